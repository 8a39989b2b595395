// Runs CUDA kernels on the CPU, for tests: what the kernels' sources use of CUDA C, and of PTX.
//
// Threads are fibers. A fiber runs until it waits: for its warp (mma, movmatrix, shuffles), its block, its cluster, or,
// while it polls the counter of `grid_sync`, for anything. Waiting threads continue in a random order, which differs
// from launch to launch. Shared memory starts as NaN, and so does the target of an asynchronous copy until the thread
// waits for it.

#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(n) alignas(n)

struct uint2 {
    unsigned x, y;
};
struct uint3 {
    unsigned x, y, z;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

static uint3 threadIdx, blockIdx, blockDim, gridDim;

extern "C" float erff(float);
extern "C" float exp2f(float);
extern "C" float tanhf(float);
extern "C" float fmaxf(float, float);
extern "C" float fmaf(float, float, float);

namespace emulator {

#define STACK_BYTES (128 * 1024)
#define GUARD_BYTES 4096
#define MAX_COPIES 256
#define MAX_STATIC 4
#define MAX_POLLS 1000000

struct Copy {
    char* to;
    const char* from;
    int bytes, group;
};

struct Block;

struct Thread {
    jmp_buf at;
    uint3 index;
    Block* block;
    int lane, warp;
    bool started, done;
    long cluster_phase;
    void** operands;
    Copy copies[MAX_COPIES];
    int num_copies, group;
};

struct Warp {
    int alive, arrived;
    const char* operation;
    Thread* waiting[32];
};

struct Cluster {
    int arrived, threads;
    long phase;
    int num_waiting;
    Thread** waiting;
};

struct Block {
    uint3 index;
    int alive, arrived;
    Thread* threads;
    Thread** waiting;
    Warp* warps;
    Cluster* cluster;
    int rank;
    char* shared;
    const char* statics[MAX_STATIC];
    char* static_memory[MAX_STATIC];
};

static char error[512];
static jmp_buf scheduler;
static ucontext_t main_context;
static Thread* now;
static Block* blocks;
static Thread** ready;  // a ring
static long num_ready, first_ready, ready_size, polls, shared_bytes;
static uint64_t random_state = 88172645463325252ull;
static void (*kernel)(void*);
static void* kernel_args;
static char* stacks;
static size_t stacks_size;

__attribute__((noreturn)) inline void fail(const char* format, const char* what = "") {
    snprintf(error, sizeof error, format, what);
    _longjmp(scheduler, 2);
}

inline unsigned random_below(unsigned n) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (unsigned)((random_state >> 32) % n);
}

inline void push(Thread* thread) {
    ready[(first_ready + num_ready) % ready_size] = thread;
    ++num_ready;
}

// Let threads continue, in a random order.
inline void release(Thread** threads, int count) {
    for (int i = count - 1; i > 0; --i) {
        const int j = random_below(i + 1);
        Thread* swapped = threads[i];
        threads[i] = threads[j];
        threads[j] = swapped;
    }
    for (int i = 0; i < count; ++i) push(threads[i]);
}

__attribute__((noinline)) inline void start_next() {
    if (num_ready == 0) _longjmp(scheduler, 1);
    Thread* next = ready[first_ready];
    first_ready = (first_ready + 1) % ready_size;
    --num_ready;
    now = next;
    threadIdx = next->index;
    blockIdx = next->block->index;
    if (next->started) _longjmp(next->at, 1);
    _longjmp(scheduler, 3);
}

__attribute__((noinline)) inline void wait() {
    if (_setjmp(now->at) == 0) start_next();
}

inline void leave();

static void enter() {
    kernel(kernel_args);
    leave();
}

inline void release_block(Block* block) {
    polls = 0;
    release(block->waiting, block->arrived);
    block->arrived = 0;
}

inline void leave() {
    Thread* thread = now;
    Block* block = thread->block;
    thread->done = true;
    --block->warps[thread->warp].alive;
    --block->alive;
    --block->cluster->threads;
    polls = 0;
    if (block->warps[thread->warp].arrived) fail("a thread ended while its warp was waiting for it");
    if (block->alive && block->arrived == block->alive) release_block(block);
    start_next();
}

// Wait for the other lanes of the warp, whose operands the last one sees.
template <typename Function>
inline void with_warp(const char* operation, void** operands, bool whole, Function function) {
    Warp& warp = now->block->warps[now->warp];
    if (warp.arrived && warp.operation != operation) fail("lanes of one warp wait for different operations: %s", operation);
    if (whole && warp.alive != 32) fail("%s: a lane of the warp has ended", operation);
    warp.operation = operation;
    now->operands = operands;
    warp.waiting[warp.arrived++] = now;
    if (warp.arrived < warp.alive) {
        wait();
        return;
    }
    Thread* lanes[32] = {};
    for (int i = 0; i < warp.arrived; ++i) lanes[warp.waiting[i]->lane] = warp.waiting[i];
    function(lanes);
    const int others = warp.arrived - 1;
    warp.arrived = 0;
    release(warp.waiting, others);
}

inline char* dynamic_shared() { return now->block->shared; }

template <typename Type>
inline Type& static_shared(const char* key) {
    Block* block = now->block;
    int slot = 0;
    while (block->statics[slot] && block->statics[slot] != key) ++slot;
    if (!block->statics[slot]) {
        if (slot == MAX_STATIC - 1) fail("too many shared variables");
        block->statics[slot] = key;
        block->static_memory[slot] = (char*)aligned_alloc(128, (sizeof(Type) + 127) / 128 * 128);
        memset(block->static_memory[slot], 0xff, sizeof(Type));
    }
    return *(Type*)block->static_memory[slot];
}

inline char* map_stacks(size_t size) {
    if (size > stacks_size) {
        if (stacks) munmap(stacks, stacks_size);
        stacks = (char*)mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        stacks_size = size;
    }
    return stacks;
}

// Run blocks first to first + count, all at once.
inline bool run_blocks(long first, long count, int cluster_size) {
    const int threads = blockDim.x * blockDim.y * blockDim.z, warps = (threads + 31) / 32;
    char* memory = map_stacks((size_t)count * threads * STACK_BYTES);
    blocks = (Block*)calloc(count, sizeof(Block));
    ready_size = count * threads + 1;
    ready = (Thread**)malloc(ready_size * sizeof(Thread*));
    num_ready = first_ready = polls = 0;
    Cluster* clusters = (Cluster*)calloc(count, sizeof(Cluster));
    for (long b = 0; b < count; ++b) {
        Block& block = blocks[b];
        const long number = first + b;
        block.index = {(unsigned)(number % gridDim.x), (unsigned)(number / gridDim.x % gridDim.y),
                       (unsigned)(number / gridDim.x / gridDim.y)};
        block.alive = threads;
        block.threads = (Thread*)malloc(threads * sizeof(Thread));
        block.waiting = (Thread**)malloc(threads * sizeof(Thread*));
        block.warps = (Warp*)calloc(warps, sizeof(Warp));
        block.cluster = clusters + b / cluster_size;
        block.rank = (int)(b % cluster_size);
        if (!block.cluster->waiting)
            block.cluster->waiting = (Thread**)malloc(cluster_size * threads * sizeof(Thread*));
        block.cluster->threads += threads;
        block.shared = (char*)aligned_alloc(128, (shared_bytes + GUARD_BYTES + 127) / 128 * 128);
        memset(block.shared, 0xff, shared_bytes + GUARD_BYTES);
        for (int t = 0; t < threads; ++t) {
            Thread& thread = block.threads[t];
            thread.index = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
            thread.block = &block;
            thread.lane = t % 32;
            thread.warp = t / 32;
            thread.started = thread.done = false;
            thread.num_copies = thread.group = 0;
            ++block.warps[t / 32].alive;
            block.waiting[t] = &thread;
        }
        release(block.waiting, threads);
    }
    const int event = _setjmp(scheduler);
    if (event == 0) start_next();
    if (event == 3) {
        const long number = (now->block - blocks) * threads + (now - now->block->threads);
        now->started = true;
        static ucontext_t fresh;
        getcontext(&fresh);
        fresh.uc_stack.ss_sp = memory + number * STACK_BYTES;
        fresh.uc_stack.ss_size = STACK_BYTES;
        fresh.uc_link = 0;
        makecontext(&fresh, enter, 0);
        setcontext(&fresh);
    }
    if (event == 1) {
        for (long b = 0; b < count && !error[0]; ++b) {
            if (blocks[b].alive) snprintf(error, sizeof error, "deadlock: threads wait for each other");
            for (long i = 0; i < GUARD_BYTES; ++i)
                if ((unsigned char)blocks[b].shared[shared_bytes + i] != 0xff && !error[0])
                    snprintf(error, sizeof error, "a thread wrote beyond the end of shared memory");
        }
    }
    for (long b = 0; b < count; ++b) {
        free(blocks[b].threads);
        free(blocks[b].waiting);
        free(blocks[b].warps);
        free(blocks[b].shared);
        for (int i = 0; i < MAX_STATIC; ++i) free(blocks[b].static_memory[i]);
        free(clusters[b].waiting);
    }
    free(blocks);
    free(clusters);
    free(ready);
    return !error[0];
}

// Launch a kernel: sizes of grid and block, bytes of shared memory, whether all blocks run at once.
inline const char* launch(void (*function)(void*), void* args, const unsigned* sizes, int cluster_size) {
    gridDim = {sizes[0], sizes[1], sizes[2]};
    blockDim = {sizes[3], sizes[4], sizes[5]};
    shared_bytes = sizes[6];
    kernel = function;
    kernel_args = args;
    error[0] = 0;
    const long total = (long)sizes[0] * sizes[1] * sizes[2];
    const long together = sizes[7] ? total : cluster_size;
    if (total % together) return "the grid has no whole clusters";
    for (long first = 0; first < total; first += together)
        if (!run_blocks(first, together, cluster_size)) break;
    return error[0] ? error : 0;
}

inline float from_half(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
    uint32_t word;
    float value;
    if (exponent == 0) {
        value = fraction * (1.0f / 16777216.0f);
        return sign ? -value : value;
    }
    word = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    memcpy(&value, &word, 4);
    return value;
}

inline uint16_t to_half(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    const uint16_t sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return sign | 0x7fff;
    if (bits >= 0x47800000u) return sign | 0x7c00;
    if (bits < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded multiple of 2^-24 in the lowest bits
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, 4);
        return sign | (uint16_t)(bits - 0x3f000000u);
    }
    bits += 0xfff + (bits >> 13 & 1);
    return sign | (uint16_t)((bits - 0x38000000u) >> 13);
}

inline float from_bfloat(uint16_t bits) {
    const uint32_t word = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &word, 4);
    return value;
}

inline uint16_t to_bfloat(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float operand(unsigned pair, int half) {
    const uint16_t bits = (uint16_t)(pair >> 16 * half);
    return DTYPE == 1 ? from_bfloat(bits) : from_half(bits);
}

// The fragments of mma.sync: `a` row by row in halves of 8 columns, `b` column by column in halves of 8 rows.
inline void multiply(Thread** lanes, int halves) {
    float a[16][16], b[8][16];
    for (int lane = 0; lane < 32; ++lane) {
        const int g = lane / 4, q = lane % 4;
        void** operands = lanes[lane]->operands;
        for (int half = 0; half < halves; ++half)
            for (int i = 0; i < 2; ++i) {
                for (int lower = 0; lower < 2; ++lower)
                    a[g + 8 * lower][8 * half + 2 * q + i] =
                        operand(*(unsigned*)operands[4 + 2 * half + lower], i);
                b[g][8 * half + 2 * q + i] = operand(*(unsigned*)operands[4 + 2 * halves + half], i);
            }
    }
    for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
            float sum = 0.0f;
            for (int k = 0; k < 8 * halves; ++k) sum += a[row][k] * b[column][k];
            *(float*)lanes[lane]->operands[i] += sum;
        }
}

}  // namespace emulator

inline void __syncthreads() {
    emulator::Block* block = emulator::now->block;
    block->waiting[block->arrived++] = emulator::now;
    if (block->arrived == block->alive) emulator::release_block(block);
    emulator::wait();
}

inline void __syncwarp() {
    emulator::with_warp("__syncwarp", 0, false, [](emulator::Thread**) {});
}

inline void __threadfence() {}

inline float __shfl_xor_sync(unsigned mask, float value, int distance) {
    float found;
    void* operands[] = {&found, &value, &distance};
    emulator::with_warp("__shfl_xor_sync", operands, true, [](emulator::Thread** lanes) {
        for (int lane = 0; lane < 32; ++lane) {
            void** own = lanes[lane]->operands;
            *(float*)own[0] = *(float*)lanes[lane ^ *(int*)own[2]]->operands[1];
        }
    });
    return found;
}

inline unsigned atomicAdd(unsigned* to, unsigned value) {
    emulator::polls = 0;
    const unsigned before = *to;
    *to += value;
    return before;
}

inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) result |= (unsigned)(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}
template <typename Type>
inline Type __ldcg(const Type* from) {
    return *from;
}
inline size_t __cvta_generic_to_shared(const void* address) {
    return (const char*)address - emulator::now->block->shared;
}
template <typename A, typename B>
inline auto min(A a, B b) -> decltype(a + b) {
    return a < b ? a : b;
}
template <typename A, typename B>
inline auto max(A a, B b) -> decltype(a + b) {
    return a > b ? a : b;
}

// One function for each instruction, with the operands of the `asm` statement: outputs first.
namespace ptx {

inline void nothing(int&) {}
inline void ex2_approx_ftz_f32(float& y, float x) { y = exp2f(x); }
inline void rcp_approx_ftz_f32(float& y, float x) { y = 1.0f / x; }
inline void tanh_approx_f32(float& y, float x) { y = tanhf(x); }
inline void cvt_rn_bf16x2_f32(unsigned& pair, float upper, float lower) {
    pair = (unsigned)emulator::to_bfloat(upper) << 16 | emulator::to_bfloat(lower);
}
inline void cvt_rn_f16x2_f32(unsigned& pair, float upper, float lower) {
    pair = (unsigned)emulator::to_half(upper) << 16 | emulator::to_half(lower);
}
inline void cvt_f32_f16_a(float& x, unsigned pair) { x = emulator::from_half((uint16_t)pair); }
inline void cvt_f32_f16_b(float& x, unsigned pair) { x = emulator::from_half((uint16_t)(pair >> 16)); }

inline void mma_sync_aligned_m16n8k16_row_col(float& c0, float& c1, float& c2, float& c3, unsigned a0, unsigned a1,
                                              unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    void* operands[] = {&c0, &c1, &c2, &c3, &a0, &a1, &a2, &a3, &b0, &b1};
    emulator::with_warp("mma.m16n8k16", operands, true, [](emulator::Thread** lanes) { emulator::multiply(lanes, 2); });
}
inline void mma_sync_aligned_m16n8k8_row_col(float& c0, float& c1, float& c2, float& c3, unsigned a0, unsigned a1,
                                             unsigned b0) {
    void* operands[] = {&c0, &c1, &c2, &c3, &a0, &a1, &b0};
    emulator::with_warp("mma.m16n8k8", operands, true, [](emulator::Thread** lanes) { emulator::multiply(lanes, 1); });
}
inline void movmatrix_sync_aligned_m8n8_trans_b16(unsigned& turned, unsigned pair) {
    void* operands[] = {&turned, &pair};
    emulator::with_warp("movmatrix", operands, true, [](emulator::Thread** lanes) {
        for (int lane = 0; lane < 32; ++lane) {
            unsigned result = 0;
            for (int i = 0; i < 2; ++i) {
                const int row = 2 * (lane % 4) + i, column = lane / 4;
                const unsigned from = *(unsigned*)lanes[row * 4 + column / 2]->operands[1];
                result |= (from >> 16 * (column % 2) & 0xffff) << 16 * i;
            }
            *(unsigned*)lanes[lane]->operands[0] = result;
        }
    });
}

inline void st_global_v4_u32(void* to, unsigned a, unsigned b, unsigned c, unsigned d) {
    if ((uintptr_t)to % 16) emulator::fail("st.global.v4: the address is not aligned");
    const unsigned parts[] = {a, b, c, d};
    memcpy(to, parts, 16);
}
inline void cp_async_cg_shared_global(unsigned to, const void* from, int bytes) {
    emulator::Thread* thread = emulator::now;
    if (to % 16 || (bytes && (uintptr_t)from % 16)) emulator::fail("cp.async: the address is not aligned");
    if (to + 16 > emulator::shared_bytes) emulator::fail("cp.async: the target is not in shared memory");
    if (thread->num_copies == MAX_COPIES) emulator::fail("cp.async: too many copies under way");
    char* target = thread->block->shared + to;
    memset(target, 0xff, 16);
    thread->copies[thread->num_copies++] = {target, (const char*)from, bytes, thread->group};
}
inline void cp_async_commit_group() { ++emulator::now->group; }
inline void cp_async_wait_group(int later) {
    emulator::Thread* thread = emulator::now;
    int kept = 0;
    for (int i = 0; i < thread->num_copies; ++i) {
        const emulator::Copy copy = thread->copies[i];
        if (copy.group >= thread->group - later) {
            thread->copies[kept++] = copy;
            continue;
        }
        memset(copy.to, 0, 16);
        memcpy(copy.to, copy.from, copy.bytes);
    }
    thread->num_copies = kept;
}
inline void ld_acquire_gpu_global_u32(unsigned& value, const void* from) {
    if (++emulator::polls > MAX_POLLS) emulator::fail("deadlock: a thread polls a counter that nobody changes");
    emulator::push(emulator::now);
    emulator::wait();
    memcpy(&value, from, 4);
}
inline void mapa_u64(unsigned long long& there, const void* here, int rank) {
    emulator::Block* block = emulator::now->block;
    there = (unsigned long long)((block + rank - block->rank)->shared + ((const char*)here - block->shared));
}
inline void barrier_cluster_arrive_release_aligned() {
    emulator::Cluster* cluster = emulator::now->block->cluster;
    emulator::now->cluster_phase = cluster->phase;
    if (++cluster->arrived < cluster->threads) return;
    cluster->arrived = 0;
    ++cluster->phase;
    emulator::release(cluster->waiting, cluster->num_waiting);
    cluster->num_waiting = 0;
}
inline void barrier_cluster_wait_acquire_aligned() {
    emulator::Cluster* cluster = emulator::now->block->cluster;
    if (cluster->phase > emulator::now->cluster_phase) return;
    cluster->waiting[cluster->num_waiting++] = emulator::now;
    emulator::wait();
}
inline void prefetch_global_L2(const void*) {}
inline void ld_global_nc_v4_u32(unsigned& a, unsigned& b, unsigned& c, unsigned& d, const void* from) {
    if ((uintptr_t)from % 16) emulator::fail("ld.global.v4: the address is not aligned");
    unsigned parts[4];
    memcpy(parts, from, 16);
    a = parts[0], b = parts[1], c = parts[2], d = parts[3];
}

}  // namespace ptx
