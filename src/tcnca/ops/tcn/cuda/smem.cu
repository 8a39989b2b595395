// All blocks y = x + activation(convolution(x)) of short sequences, and their gradients, in shared memory.
//
// A block of threads holds a channel's whole sequence and runs all layers on it. Eight blocks, a cluster (compute
// capability 9.0), share eight neighboring channels. Each reads an eighth of the times, 16 or 32 bytes each, and
// distributes the channels to the blocks that own them; at the end it collects its times from all of them.
//
// A thread computes OUTS outputs of one chain t = phase + dilation · n. OUTS is odd, so that lanes whose data lies OUTS
// steps apart use different banks.

#define CLUSTER 8
#define OUTS 9
#define WINDOW (K + OUTS - 1)

// The same address in the shared memory of another block of the cluster.
__device__ __forceinline__ float* remote(float* here, int block) {
    unsigned long long there;
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(here), "r"(block));
    return reinterpret_cast<float*>(there);
}

// After both calls all blocks of the cluster see each other's writes; in between a block can do local work.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// Sum COUNT numbers over the warp into `to[first:limit]`. Lanes DISTANCE apart take half of the numbers each, and so
// on, which takes far fewer shuffles than to sum each number over all lanes.
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

// All channels of the cluster at one time.
__device__ __forceinline__ void read_row(float (&to)[CLUSTER], const number* from) {
    const char* bytes = reinterpret_cast<const char*>(from);
#if DTYPE == 0
    const Bytes16 low = load16(bytes), high = load16(bytes + 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[i] = __uint_as_float(low.part[i]);
        to[4 + i] = __uint_as_float(high.part[i]);
    }
#else
    const Bytes16 v = load16(bytes);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = first(v.part[i]);
        to[2 * i + 1] = second(v.part[i]);
    }
#endif
}

__device__ __forceinline__ void write_row(number* to, const float (&from)[CLUSTER]) {
#if DTYPE == 0
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        Bytes16 v;
#pragma unroll
        for (int i = 0; i < 4; ++i) v.part[i] = __float_as_uint(from[4 * half + i]);
        store_global(to + 4 * half, v);
    }
#else
    Bytes16 v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.part[i] = pack(from[2 * i], from[2 * i + 1]);
    store_global(to, v);
#endif
}

// The times that this block reads and writes.
struct Times {
    int begin, end;
};

__device__ __forceinline__ Times times_of(int time) {
    const int rank = blockIdx.x % CLUSTER, each = (time + CLUSTER - 1) / CLUSTER;
    return {rank * each, min((rank + 1) * each, time)};
}

// Send one time of all channels to the blocks that own them.
__device__ __forceinline__ void scatter_row(float* sequence, const float (&row)[CLUSTER], int t) {
#pragma unroll
    for (int c = 0; c < CLUSTER; ++c) remote(sequence, c)[t] = row[c];
}

// Collect this block's times from all owners. With `omega`, add omega times `from`, whose first `length` times count.
__device__ __forceinline__ void gather_rows(number* to, long long stride, float* sequence, const Times& times,
                                            const float* omega, const number* from, long long from_stride, int length) {
    for (int t = times.begin + threadIdx.x; t < times.end; t += THREADS) {
        float row[CLUSTER];
#pragma unroll
        for (int c = 0; c < CLUSTER; ++c) row[c] = remote(sequence, c)[t];
        if (OMEGA && omega != nullptr && t < length) {
            float added[CLUSTER];
            read_row(added, from + t * from_stride);
#pragma unroll
            for (int c = 0; c < CLUSTER; ++c) row[c] = fmaf(omega[c], added[c], row[c]);
        }
        write_row(to + t * stride, row);
    }
}

// The kernels and biases of one channel in all layers: K + 1 numbers each.
__device__ __forceinline__ void read_kernels(float* kernels, const float* weight, const float* bias, long long channel,
                                             long long channels, int depth) {
    for (int i = threadIdx.x; i < depth * (K + 1); i += THREADS) {
        const long long own = i / (K + 1) * channels + channel;
        const int j = i % (K + 1);
        kernels[i] = j < K ? weight[own * K + j] : BIAS ? bias[own] : 0.0f;
    }
}

// Read WINDOW values of a chain, the first at time t; zeros outside 0 to limit.
__device__ __forceinline__ void read_window(float (&window)[WINDOW], const float* sequence, int t, int dilation,
                                            int limit) {
    if (t >= 0 && t + (WINDOW - 1) * dilation < limit) {
#pragma unroll
        for (int i = 0; i < WINDOW; ++i) window[i] = sequence[t + i * dilation];
    } else {
#pragma unroll
        for (int i = 0; i < WINDOW; ++i) {
            const int at = t + i * dilation;
            window[i] = static_cast<word>(at) < static_cast<word>(limit) ? sequence[at] : 0.0f;
        }
    }
}

// The number of items, OUTS outputs each, in the whole sequence.
__device__ __forceinline__ int items_of(int time, int dilation) {
    const int chain = (time + dilation - 1) / dilation;
    return (chain + OUTS - 1) / OUTS * dilation;
}

// The time of an item's first output.
__device__ __forceinline__ int first_time(int item, int dilation) {
    const int segment = item / dilation;
    return item - segment * dilation + segment * OUTS * dilation;
}

// The pre-activation of output o.
__device__ __forceinline__ float convolved(const float (&window)[WINDOW], const float (&kernel)[K + 1], int o) {
    float even = kernel[K], odd = 0.0f;
#pragma unroll
    for (int j = 0; j < K; ++j) {
        float& sum = j % 2 ? odd : even;
        sum = fmaf(kernel[j], window[o + K - 1 - j], sum);
    }
    return even + odd;
}

__device__ __forceinline__ float dropout_factor(const Dropout& dropout, int t, long long channel) {
    if (!DROPOUT) return 1.0f;
    // Of the draw only the channel's pair is computed; the operations for the second pair leave the first unchanged.
    const word own = static_cast<word>(channel), second = own & 2;
    word pair = first_pair(dropout, static_cast<word>(t) * dropout.fours + own / 4) * (second ? NEXT_PAIR : 1u);
    pair ^= pair >> 16 & (second ? 0xffffffffu : 0u);
    return pair << (own & 1 ? 0 : 16) >= dropout.dropped ? dropout.scale : 0.0f;
}

// Compute one layer from one sequence to another.
__device__ __forceinline__ void forward_layer(float* to, const float* from, const float* kernels, int time, int length,
                                              int dilation, const Dropout& dropout, long long channel) {
    float kernel[K + 1];
#pragma unroll
    for (int j = 0; j <= K; ++j) kernel[j] = kernels[j];
    const int items = items_of(time, dilation);
    for (int item = threadIdx.x; item < items; item += THREADS) {
        const int t = first_time(item, dilation);
        float window[WINDOW];
        read_window(window, from, t - (K - 1 - AHEAD) * dilation, dilation, length);
#pragma unroll
        for (int o = 0; o < OUTS; ++o) {
            const int at = t + o * dilation;
            float y = activate(convolved(window, kernel, o));
            if (DROPOUT) y *= dropout_factor(dropout, at, channel);
            if (RESIDUAL) y += window[o + K - 1 - AHEAD];
            if (at < time) to[at] = y;
        }
    }
}

#if FORWARD
struct Args {
    const number* x;
    const float* weight;
    const float* bias;
    number* y;
    number* inner;
    const long long* lengths;
    const long long* seed;
    const float* omega;
    long long time, channels, x_time, x_batch, dilation, factor, depth, keep, dropped;
    double scale;
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) smem_forward(const Args args) {
    extern __shared__ __align__(128) char shared[];
    const int time = static_cast<int>(args.time), depth = static_cast<int>(args.depth);
    const long long row = blockIdx.y, group = blockIdx.x / CLUSTER * CLUSTER, channel = blockIdx.x;
    float* from = reinterpret_cast<float*>(shared);
    float* to = from + time;
    float* kernels = to + time;
    const int length = LENGTHS ? static_cast<int>(args.lengths[row]) : time;
    const Times times = times_of(time);
    const number* source = args.x + row * args.x_batch + group;
    cluster_arrive();  // no block may write into another one that has not started
#pragma unroll 1
    for (int t = times.begin + threadIdx.x; t < times.end; t += THREADS) prefetch(source + t * args.x_time);
    read_kernels(kernels, args.weight, args.bias, channel, args.channels, depth);
    cluster_wait();
    for (int t = times.begin + threadIdx.x; t < times.end; t += THREADS) {
        float x[CLUSTER];
        read_row(x, source + t * args.x_time);
        scatter_row(from, x, t);
    }
    cluster_sync();
    long long dilation = args.dilation;
    for (int layer = 0; layer < depth; ++layer) {
        const Dropout dropout = dropout_of(args.seed, layer, row, args.channels, args.dropped, args.scale);
        forward_layer(to, from, kernels + layer * (K + 1), time, length, static_cast<int>(dilation), dropout, channel);
        __syncthreads();
        float* done = to;
        to = from;
        from = done;
        dilation = min(dilation * args.factor, args.time);
        const bool last = layer + 1 == depth;
        if (!last && !args.keep) continue;
        // The other blocks read what this layer wrote while the next layer writes to the other buffer, and are done
        // when they synchronize again.
        cluster_sync();
        number* target = last ? args.y : args.inner + layer * gridDim.y * args.time * args.channels;
        gather_rows(target + row * args.time * args.channels + group, args.channels, from, times,
                    last ? args.omega + group : nullptr, source, args.x_time, length);
    }
    cluster_sync();  // no block may exit while others read its memory
}
#else
// Gradients of one sequence. The inputs of all blocks are recomputed from x.

struct Args {
    const number* x;
    const float* weight;
    const float* bias;
    const number* dy;
    number* dx;
    const long long* lengths;
    const long long* seed;
    float* dweight;
    float* dbias;
    const float* omega;
    float* domega;
    long long time, channels, x_time, dy_time, dilation, factor, depth, dropped;
    double scale;
};

// Compute dz, and this thread's sums for the gradients of kernel and bias.
__device__ __forceinline__ void backward_kernel(float* dz, const float* x, const float* dy, const float* kernels,
                                                float (&sums)[K + 1], int time, int length, int dilation,
                                                const Dropout& dropout, long long channel) {
    float kernel[K + 1];
#pragma unroll
    for (int j = 0; j <= K; ++j) {
        kernel[j] = kernels[j];
        sums[j] = 0.0f;
    }
    const int items = items_of(time, dilation);
    for (int item = threadIdx.x; item < items; item += THREADS) {
        const int t = first_time(item, dilation);
        float window[WINDOW];
        read_window(window, x, t - (K - 1 - AHEAD) * dilation, dilation, length);
#pragma unroll
        for (int o = 0; o < OUTS; ++o) {
            const int at = t + o * dilation;
            float slopes = at < time ? dy[at] : 0.0f;
            if (DROPOUT) slopes *= dropout_factor(dropout, at, channel);
            slopes *= activation_grad(convolved(window, kernel, o));
            sums[K] += slopes;
#pragma unroll
            for (int j = 0; j < K; ++j) sums[j] = fmaf(slopes, window[o + K - 1 - j], sums[j]);
            if (at < time) dz[at] = slopes;
        }
    }
}

// Compute dx in place of dy.
__device__ __forceinline__ void backward_input(float* dy, const float* dz, const float* kernels, int time, int length,
                                               int dilation) {
    float kernel[K];
#pragma unroll
    for (int j = 0; j < K; ++j) kernel[j] = kernels[j];
    const int items = items_of(time, dilation);
    for (int item = threadIdx.x; item < items; item += THREADS) {
        const int t = first_time(item, dilation);
        float window[WINDOW];
        read_window(window, dz, t - AHEAD * dilation, dilation, time);
#pragma unroll
        for (int o = 0; o < OUTS; ++o) {
            const int at = t + o * dilation;
            float even = 0.0f, odd = 0.0f;
#pragma unroll
            for (int j = 0; j < K; ++j) {
                float& sum = j % 2 ? odd : even;
                sum = fmaf(kernel[j], window[o + j], sum);
            }
            if (at < time) dy[at] = at < length ? (RESIDUAL ? dy[at] : 0.0f) + even + odd : 0.0f;
        }
    }
}

// Add the threads' sums to the gradients, in a fixed order.
__device__ __forceinline__ void write_sums(float* scratch, const float (&sums)[K + 1], float* dweight, float* dbias) {
    sum_over_warp(scratch + threadIdx.x / 32 * (K + 1), sums, 0, K + 1);
    __syncthreads();
    if (threadIdx.x > K) return;
    float sum = 0.0f;
    for (int i = 0; i < THREADS / 32; ++i) sum += scratch[i * (K + 1) + threadIdx.x];
    if (threadIdx.x < K) dweight[threadIdx.x] = sum;
    else if (BIAS) *dbias = sum;
}

// Sum x · dy over the sequence, in a fixed order: the gradient of omega.
__device__ __forceinline__ void write_domega(float* scratch, const float* x, const float* dy, int length,
                                             float* domega) {
    float sum = 0.0f;
    for (int t = threadIdx.x; t < length; t += THREADS) sum = fmaf(x[t], dy[t], sum);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int i = 1; i < THREADS / 32; ++i) sum += scratch[i];
        *domega = sum;
    }
    __syncthreads();
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS) smem_backward(const Args args) {
    extern __shared__ __align__(128) char shared[];
    const int time = static_cast<int>(args.time), depth = static_cast<int>(args.depth);
    const long long group = blockIdx.x / CLUSTER * CLUSTER, channel = blockIdx.x;
    float* inputs = reinterpret_cast<float*>(shared);  // of all layers
    float* dy = inputs + static_cast<long long>(depth) * time;
    float* dz = dy + time;
    float* kernels = dz + time;
    float* scratch = kernels + depth * (K + 1);
    const int length = LENGTHS ? static_cast<int>(*args.lengths) : time;
    const Times times = times_of(time);
    cluster_arrive();  // no block may write into another one that has not started
#pragma unroll 1
    for (int t = times.begin + threadIdx.x; t < times.end; t += THREADS) {
        prefetch(args.x + group + t * args.x_time);
        prefetch(args.dy + group + t * args.dy_time);
    }
    read_kernels(kernels, args.weight, args.bias, channel, args.channels, depth);
    cluster_wait();
    for (int t = times.begin + threadIdx.x; t < times.end; t += THREADS) {
        float x[CLUSTER], slopes[CLUSTER];
        read_row(x, args.x + group + t * args.x_time);
        read_row(slopes, args.dy + group + t * args.dy_time);
        scatter_row(inputs, x, t);
        scatter_row(dy, slopes, t);
    }
    cluster_sync();
    if (OMEGA) write_domega(scratch, inputs, dy, length, args.domega + channel);
    long long dilation = args.dilation;
    for (int layer = 0; layer + 1 < depth; ++layer) {
        const Dropout dropout = dropout_of(args.seed, layer, 0, args.channels, args.dropped, args.scale);
        float* x = inputs + layer * time;
        forward_layer(x + time, x, kernels + layer * (K + 1), time, length, static_cast<int>(dilation), dropout,
                      channel);
        __syncthreads();
        dilation = min(dilation * args.factor, args.time);
    }
    for (int layer = depth - 1; layer >= 0; --layer) {
        dilation = args.dilation;
        for (int i = 0; i < layer; ++i) dilation = min(dilation * args.factor, args.time);
        const Dropout dropout = dropout_of(args.seed, layer, 0, args.channels, args.dropped, args.scale);
        float sums[K + 1];
        backward_kernel(dz, inputs + layer * time, dy, kernels + layer * (K + 1), sums, time, length,
                        static_cast<int>(dilation), dropout, channel);
        const long long own = layer * args.channels + channel;
        write_sums(scratch, sums, args.dweight + own * K, args.dbias + own);
        // write_sums has synchronized the threads: all of dz is there.
        backward_input(dy, dz, kernels + layer * (K + 1), time, length, static_cast<int>(dilation));
        __syncthreads();
    }
    cluster_sync();
    gather_rows(args.dx + group, args.channels, dy, times, args.omega + group, args.dy + group, args.dy_time, length);
    cluster_sync();  // no block may exit while others read its memory
}
#endif
