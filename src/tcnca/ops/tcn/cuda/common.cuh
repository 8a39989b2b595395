// Shared by all kernels: machine instructions, activations and their derivatives, dropout.
//
// Compiled with K (kernel size), AHEAD (taps that look into the future), DTYPE (0 float32, 1 bfloat16, 2 float16),
// ACTIVATION (0 none, 1 silu, 2 gelu, 3 gelu_tanh, 4 relu), and the flags BIAS, RESIDUAL, LENGTHS, DROPOUT and OMEGA:
// whether the input of the first block times omega is added to the output of the last one.

typedef unsigned int word;
#if DTYPE == 0
typedef float number;
#else
typedef unsigned short number;
#endif

__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float fast_tanh(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two 16-bit numbers in a word: `first` in the low half.
#if DTYPE == 1
__device__ __forceinline__ float first(word pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float second(word pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ word pack(float a, float b) {
    word pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    return pair;
}
#elif DTYPE == 2
__device__ __forceinline__ float first(word pair) {
    float x;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(x) : "r"(pair));
    return x;
}
__device__ __forceinline__ float second(word pair) {
    float x;
    asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(x) : "r"(pair));
    return x;
}
__device__ __forceinline__ word pack(float a, float b) {
    word pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(b), "f"(a));
    return pair;
}
#endif

#if DTYPE != 0
#if DTYPE == 1
#define OPERAND ".f32.bf16.bf16.f32"
#else
#define OPERAND ".f32.f16.f16.f32"
#endif

// c += a · b for a 16 × 16 and a 16 × 8 matrix, and the same for half of the inner size.
__device__ __forceinline__ void multiply16(float (&c)[4], word a0, word a1, word a2, word a3, word b0, word b1) {
    asm("mma.sync.aligned.m16n8k16.row.col" OPERAND " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply8(float (&c)[4], word a0, word a1, word b0) {
    asm("mma.sync.aligned.m16n8k8.row.col" OPERAND " {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
}

// Transpose an 8 × 8 matrix of 16-bit numbers, of which every lane holds a pair.
__device__ __forceinline__ word transpose(word pair) {
    word turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

__device__ __forceinline__ word low_halves(word a, word b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ word high_halves(word a, word b) { return __byte_perm(a, b, 0x7632); }
#endif

// Return x in a way that the compiler cannot see through: values derived from it are computed where they are needed,
// and occupy no registers before.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

struct Bytes16 {
    word part[4];
};

__device__ __forceinline__ Bytes16 load16(const char* from) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    return {v.x, v.y, v.z, v.w};
}

__device__ __forceinline__ void store16(char* to, const Bytes16& v) {
    *reinterpret_cast<uint4*>(to) = make_uint4(v.part[0], v.part[1], v.part[2], v.part[3]);
}

// The compiler would split this into four small stores.
__device__ __forceinline__ void store_global(void* to, const Bytes16& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.part[0]), "r"(v.part[1]), "r"(v.part[2]),
                 "r"(v.part[3])
                 : "memory");
}

// Memory that the kernel does not write.
__device__ __forceinline__ Bytes16 load_global(const void* from) {
    Bytes16 v;
    asm("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.part[0]), "=r"(v.part[1]), "=r"(v.part[2]), "=r"(v.part[3])
        : "l"(from));
    return v;
}

// Read from device memory into the second-level cache.
__device__ __forceinline__ void prefetch(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

// Copy 16 bytes from device to shared memory, zeros unless `valid`; complete after `wait_group`.
__device__ __forceinline__ void copy_async(void* target, const void* source, bool valid) {
    word to = static_cast<word>(__cvta_generic_to_shared(target));
    int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int later>
__device__ __forceinline__ void wait_group() {
    asm volatile("cp.async.wait_group %0;" ::"n"(later) : "memory");
}

// Wait for all blocks of the grid. The counter is zero between launches.
__device__ __forceinline__ void grid_sync(word* counter, word goal) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(counter, 1u);
        word arrived_blocks;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived_blocks) : "l"(counter) : "memory");
        } while (arrived_blocks < goal);
    }
    __syncthreads();
}

// The last block to arrive here resets the counters of `grid_sync` for the next launch.
__device__ __forceinline__ void reset_counter(word* counter) {
    if (threadIdx.x == 0 && atomicAdd(counter + 1, 1u) + 1 == gridDim.x) {
        counter[0] = 0;
        counter[1] = 0;
    }
}

#if DTYPE == 1
// The error of the approximation, 2^-11, is far below the rounding of the result.
__device__ __forceinline__ float tanh_of(float x) { return fast_tanh(x); }
__device__ __forceinline__ float sigmoid(float x) { return fmaf(0.5f, fast_tanh(0.5f * x), 0.5f); }
#else
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + fast_exp2(-1.4426950408889634f * x)); }
__device__ __forceinline__ float tanh_of(float x) { return fmaf(2.0f, sigmoid(2.0f * x), -1.0f); }
#endif

__device__ __forceinline__ float activate(float z) {
#if ACTIVATION == 1 && DTYPE == 1
    float half = 0.5f * z;
    return fmaf(half, fast_tanh(half), half);
#elif ACTIVATION == 1
    return z * sigmoid(z);
#elif ACTIVATION == 2
    return 0.5f * z * (1.0f + erff(0.7071067811865476f * z));
#elif ACTIVATION == 3
    return 0.5f * z * (1.0f + tanh_of(0.7978845608028654f * fmaf(0.044715f * z * z, z, z)));
#elif ACTIVATION == 4
    return fmaxf(z, 0.0f);
#else
    return z;
#endif
}

__device__ __forceinline__ float activation_grad(float z) {
#if ACTIVATION == 1
    float s = sigmoid(z);
    return fmaf(s, fmaf(-z, s, z), s);
#elif ACTIVATION == 2
    float density = 0.3989422804014327f * fast_exp2(-0.7213475204444817f * z * z);
    return fmaf(z, density, 0.5f * (1.0f + erff(0.7071067811865476f * z)));
#elif ACTIVATION == 3
    float t = tanh_of(0.7978845608028654f * fmaf(0.044715f * z * z, z, z));
    float inner = 0.7978845608028654f * fmaf(0.134145f * z, z, 1.0f);
    return 0.5f * fmaf(z * inner, fmaf(-t, t, 1.0f), 1.0f + t);
#elif ACTIVATION == 4
    return z > 0.0f ? 1.0f : 0.0f;
#else
    return 1.0f;
#endif
}

// The same times `scale`, given Z_SCALE · z. Half of z costs nothing, because halving taps and bias is exact in
// bfloat16.
#if ACTIVATION == 1 && DTYPE == 1
#define Z_SCALE 0.5f
__device__ __forceinline__ float activate_scaled(float half, float scale) {
    const float scaled = half * scale;
    return fmaf(scaled, fast_tanh(half), scaled);
}
__device__ __forceinline__ float activation_grad_scaled(float half, float scale) {
    const float t = fast_tanh(half), s = fmaf(0.5f * scale, t, 0.5f * scale);
    return fmaf(s, fmaf(-half, t, half), s);
}
#else
#define Z_SCALE 1.0f
__device__ __forceinline__ float activate_scaled(float z, float scale) { return activate(z) * scale; }
__device__ __forceinline__ float activation_grad_scaled(float z, float scale) { return activation_grad(z) * scale; }
#endif

// A hash in which every bit of the result depends on every bit of x.
__device__ __forceinline__ word hash(word x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

// Counter-based random numbers: the backward pass drops what the forward pass dropped, in every kernel family. One draw
// serves four neighboring channels at one time with 16 bits each, lower halves first. `fours` is the number of draws at
// one time; `dropped` is compared with the upper half of a word.
struct Dropout {
    word first_key, second_key, dropped, fours;
    float scale;
};

struct Draw {
    word pair[2];
};

__device__ __forceinline__ Dropout dropout_of(const long long* seed, long long layer, long long row, long long channels,
                                              long long dropped, double scale) {
    Dropout dropout;
#if DROPOUT
    const word low = static_cast<word>(*seed), high = static_cast<word>(*seed >> 32);
    const word place = hash(static_cast<word>(layer) * 0x9e3779b9u + hash(static_cast<word>(row) + 0x85ebca6bu));
    dropout.first_key = hash(low ^ place);
    dropout.second_key = hash(high + hash(dropout.first_key ^ 0xc2b2ae35u));
#endif
    // If all values are dropped, this overflows to 0 and `scale` is 0.
    dropout.dropped = static_cast<word>(dropped) << 16;
    dropout.fours = static_cast<word>((channels + 3) / 4);
    dropout.scale = static_cast<float>(scale);
    return dropout;
}

__device__ __forceinline__ word first_pair(const Dropout& dropout, word index) {
    word x = index + dropout.first_key;
    x = (x ^ x >> 16) * 0x7feb352du + dropout.second_key;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

#define NEXT_PAIR 0x9e3779b1u

__device__ __forceinline__ Draw draw(const Dropout& dropout, word index) {
    Draw drawn;
    drawn.pair[0] = first_pair(dropout, index);
    const word x = drawn.pair[0] * NEXT_PAIR;
    drawn.pair[1] = x ^ x >> 16;
    return drawn;
}

__device__ __forceinline__ Draw draw_at(const Dropout& dropout, long long time, long long channel) {
    return draw(dropout, static_cast<word>(time) * dropout.fours + static_cast<word>(channel / 4));
}

// Whether the value of a channel is kept, given its draw.
__device__ __forceinline__ bool is_kept(const Dropout& dropout, const Draw& drawn, int channel) {
    const word pair = channel & 2 ? drawn.pair[1] : drawn.pair[0];
    return (channel & 1 ? pair : pair << 16) >= dropout.dropped;
}
