// The few machine instructions the kernels need, each in a function of its own.

typedef unsigned int word;

__device__ __forceinline__ float exp2_near(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float tanh_near(float x) {
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

// c += a · b, 16 × 16 times 16 × 8, and the same for half of the inner size.
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

// Rows for columns, in an 8 × 8 matrix of 16-bit numbers that the warp holds, a pair a lane.
__device__ __forceinline__ word transpose(word pair) {
    word turned;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
    return turned;
}

__device__ __forceinline__ word lows(word a, word b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ word highs(word a, word b) { return __byte_perm(a, b, 0x7632); }
#endif

// The same number, of which the compiler does not know that: what follows from it is computed where it is needed, and
// takes no registers before.
__device__ __forceinline__ int veiled(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

struct Four {
    word part[4];
};

__device__ __forceinline__ Four read_four(const char* from) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    return {v.x, v.y, v.z, v.w};
}

__device__ __forceinline__ void write_four(char* to, const Four& v) {
    *reinterpret_cast<uint4*>(to) = make_uint4(v.part[0], v.part[1], v.part[2], v.part[3]);
}

// Left to itself the compiler makes four small writes of this.
__device__ __forceinline__ void write_out(void* to, const Four& v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.part[0]), "r"(v.part[1]), "r"(v.part[2]),
                 "r"(v.part[3])
                 : "memory");
}

// Sixteen bytes from device to shared memory, zeros where the source is not `real`; done after `arrived`.
__device__ __forceinline__ void fetch(void* target, const void* source, bool real) {
    word to = static_cast<word>(__cvta_generic_to_shared(target));
    int bytes = real ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(source), "r"(bytes) : "memory");
}

__device__ __forceinline__ void close_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int later>
__device__ __forceinline__ void arrived() {
    asm volatile("cp.async.wait_group %0;" ::"n"(later) : "memory");
}

// Every block of the grid waits for every other. The counter is zero between launches.
__device__ __forceinline__ void meet(word* counter, word goal) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(counter, 1u);
        word seen;
        do {
            asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
        } while (seen < goal);
    }
    __syncthreads();
}

// The last block to leave puts the counters of `meet` back to zero for the next launch.
__device__ __forceinline__ void leave(word* counter) {
    if (threadIdx.x == 0 && atomicAdd(counter + 1, 1u) + 1 == gridDim.x) {
        counter[0] = 0;
        counter[1] = 0;
    }
}
