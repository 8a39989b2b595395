// Dilated depthwise convolution along polyphase chains, the last inputs of a chain in a ring of registers.
//
// A thread owns VECTOR neighboring channels of one chain t = phase + dilation · n, over a segment of `steps` outputs
// of it. Every input is loaded once, many steps before it is needed. Ring slots are known when compiling,
// because the loop over time is unrolled as often as the ring has slots.

#if DTYPE == 0
typedef float number;
__device__ __forceinline__ float widen(number x) { return x; }
__device__ __forceinline__ number narrow(float x) { return x; }
#else
typedef unsigned short number;
__device__ __forceinline__ float widen(number x) { return first(x); }
__device__ __forceinline__ number narrow(float x) { return static_cast<number>(pack(x, 0.0f)); }
#endif

struct alignas(sizeof(number) * VECTOR) Vector {
    number part[VECTOR];
};

__device__ __forceinline__ Vector zeros() {
    Vector v;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) v.part[i] = 0;
    return v;
}

// Which steps of the chain of `phase` lie before time `end`.
__device__ __forceinline__ int steps_before(long long end, long long phase, long long dilation) {
    return end <= phase ? 0 : static_cast<int>((end - phase + dilation - 1) / dilation);
}

// Kernels of the block's channels, read side by side into shared memory, then each thread's own into registers.
__device__ __forceinline__ void share_kernels(float* shared, const float* weight, long long channels) {
    const long long from = static_cast<long long>(blockIdx.y) * blockDim.x * VECTOR;
    const long long left = channels - from;
    const int here = static_cast<int>(left < blockDim.x * VECTOR ? left : blockDim.x * VECTOR) * K;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < here; i += blockDim.x * blockDim.y)
        shared[i] = weight[from * K + i];
    __syncthreads();
}
