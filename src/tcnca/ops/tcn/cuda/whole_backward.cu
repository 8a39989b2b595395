// Gradients of `depth` blocks y = x + activation(convolution(x)) of one short sequence, in shared memory.
//
// The inputs of all blocks are computed again; nothing but x is kept from the forward pass.

struct Job {
    const number* x;
    const float* weight;
    const float* bias;
    const number* dy;
    number* dx;
    const long long* lengths;
    const long long* seed;
    float* dweight;
    float* dbias;
    long long time, channels, x_time, dy_time, dilation, factor, depth, dropped;
    double scale;
};

// dz, and what it gives to the kernel's gradients and to that of the bias.
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
            if (DROPOUT) slopes *= kept_of(dropout, at, channel);
            slopes *= slope(convolved(window, kernel, o));
            sums[K] += slopes;
#pragma unroll
            for (int j = 0; j < K; ++j) sums[j] = fmaf(slopes, window[o + K - 1 - j], sums[j]);
            if (at < time) dz[at] = slopes;
        }
    }
}

// dx, in the place of dy.
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

// The threads' sums to the gradients, in an order that never changes.
__device__ __forceinline__ void write_sums(float* scratch, const float (&sums)[K + 1], float* dweight, float* dbias) {
    sum_over_warp(scratch + threadIdx.x / 32 * (K + 1), sums, 0, K + 1);
    __syncthreads();
    if (threadIdx.x > K) return;
    float sum = 0.0f;
    for (int i = 0; i < THREADS / 32; ++i) sum += scratch[i * (K + 1) + threadIdx.x];
    if (threadIdx.x < K) dweight[threadIdx.x] = sum;
    else if (BIAS) *dbias = sum;
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS) whole_backward(const Job job) {
    extern __shared__ __align__(128) char shared[];
    const int time = static_cast<int>(job.time), depth = static_cast<int>(job.depth);
    const long long group = blockIdx.x / CLUSTER * CLUSTER, channel = blockIdx.x;
    float* inputs = reinterpret_cast<float*>(shared);  // of all layers
    float* dy = inputs + static_cast<long long>(depth) * time;
    float* dz = dy + time;
    float* kernels = dz + time;
    float* scratch = kernels + depth * (K + 1);
    const int length = LENGTHS ? static_cast<int>(*job.lengths) : time;
    const Times times = times_of(time);
    reach_cluster();  // nobody writes into a block that has not started
#pragma unroll 1
    for (int t = times.begin + threadIdx.x; t < times.end; t += THREADS) {
        expect(job.x + group + t * job.x_time);
        expect(job.dy + group + t * job.dy_time);
    }
    read_kernels(kernels, job.weight, job.bias, channel, job.channels, depth);
    await_cluster();
    for (int t = times.begin + threadIdx.x; t < times.end; t += THREADS) {
        float x[CLUSTER], slopes[CLUSTER];
        read_row(x, job.x + group + t * job.x_time);
        read_row(slopes, job.dy + group + t * job.dy_time);
        hand_out(inputs, x, t);
        hand_out(dy, slopes, t);
    }
    meet_cluster();
    long long dilation = job.dilation;
    for (int layer = 0; layer + 1 < depth; ++layer) {
        const Dropout dropout = dropout_of(job.seed, layer, 0, job.channels, job.dropped, job.scale);
        float* x = inputs + layer * time;
        forward_layer(x + time, x, kernels + layer * (K + 1), time, length, static_cast<int>(dilation), dropout,
                      channel);
        __syncthreads();
        dilation = min(dilation * job.factor, job.time);
    }
    for (int layer = depth - 1; layer >= 0; --layer) {
        dilation = job.dilation;
        for (int i = 0; i < layer; ++i) dilation = min(dilation * job.factor, job.time);
        const Dropout dropout = dropout_of(job.seed, layer, 0, job.channels, job.dropped, job.scale);
        float sums[K + 1];
        backward_kernel(dz, inputs + layer * time, dy, kernels + layer * (K + 1), sums, time, length,
                        static_cast<int>(dilation), dropout, channel);
        const long long own = layer * job.channels + channel;
        write_sums(scratch, sums, job.dweight + own * K, job.dbias + own);
        // The threads have met among their sums: all of dz is there.
        backward_input(dy, dz, kernels + layer * (K + 1), time, length, static_cast<int>(dilation));
        __syncthreads();
    }
    meet_cluster();
    gather(job.dx + group, job.channels, dy, times);
    meet_cluster();  // nobody leaves while others read
}
