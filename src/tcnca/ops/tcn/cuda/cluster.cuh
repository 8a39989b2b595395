// What blocks of a cluster, a group that runs side by side on a chip of capability 9.0 or more, do with each other.

// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ float* beside_in(float* here, int block) {
    unsigned long long there;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(block));
    return reinterpret_cast<float*>(there);
}

// All blocks of the cluster wait for each other, and see what the others wrote: between the two calls a block can do
// what concerns itself alone.
__device__ __forceinline__ void reach_cluster() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void await_cluster() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void meet_cluster() {
    reach_cluster();
    await_cluster();
}

// Bring what will be read from device memory nearer.
__device__ __forceinline__ void expect(const void* from) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory");
}

// Sums of COUNT numbers over the warp, written as numbers `first` to `limit` of `to`. Lanes DISTANCE apart take half of
// the numbers each, and so on: far fewer exchanges than a sum of each number over all lanes takes.
template <int COUNT, int DISTANCE = 16>
__device__ __forceinline__ void sum_over_warp(float* to, const float (&numbers)[COUNT], int first, int limit) {
    constexpr int HALF = (COUNT + 1) / 2;
    const bool upper = threadIdx.x & DISTANCE;
    float sums[HALF];
#pragma unroll
    for (int i = 0; i < HALF; ++i) {
        const float low = numbers[i], high = HALF + i < COUNT ? numbers[(HALF + i) % COUNT] : 0.0f;
        sums[i] = (upper ? high : low) + __shfl_xor_sync(0xffffffffu, upper ? low : high, DISTANCE);
    }
    limit = upper ? limit : min(limit, first + HALF);
    first = upper ? first + HALF : first;
    if constexpr (DISTANCE > 1) {
        sum_over_warp<HALF, DISTANCE / 2>(to, sums, first, limit);
    } else {
#pragma unroll
        for (int i = 0; i < HALF; ++i)
            if (first + i < limit) to[first + i] = sums[i];
    }
}
