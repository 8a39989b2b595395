// One block y = x + activation(convolution(x)) with a ring of inputs.

#if PAST == 0
typedef float kept;
__device__ __forceinline__ float widen_kept(kept x) { return x; }
#elif PAST == DTYPE
typedef number kept;
__device__ __forceinline__ float widen_kept(kept x) { return widen(x); }
#endif

struct Job {
    const number* x;
    const float* weight;
    const float* bias;
    number* y;
    const long long* lengths;
    const long long* seed;
    const kept* past;
    const long long* position;
    long long time, channels, dilation, x_time, x_batch, y_time, y_batch, phases, segments, steps, layer, dropped;
    double scale;
};

extern "C" __global__ void __launch_bounds__(128) ring_forward(const Job job) {
    __shared__ float shared[32 * VECTOR * K];
    share_kernels(shared, job.weight, job.channels);
    const long long channel = (static_cast<long long>(blockIdx.y) * blockDim.x + threadIdx.x) * VECTOR;
    const long long item = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    const long long row = blockIdx.z;
    if (channel >= job.channels || item >= job.phases * job.segments) return;

    float weight[VECTOR][K], bias[VECTOR];
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        bias[v] = BIAS ? job.bias[channel + v] : 0.0f;
#pragma unroll
        for (int j = 0; j < K; ++j) weight[v][j] = shared[(threadIdx.x * VECTOR + v) * K + j];
    }
    const long long phase = item % job.phases;
    const int begin = static_cast<int>(item / job.phases * job.steps);
    int end = steps_before(job.time, phase, job.dilation);
    if (begin + job.steps < end) end = static_cast<int>(begin + job.steps);
    int real = steps_before(LENGTHS ? job.lengths[row] : job.time, phase, job.dilation);
    if (end + AHEAD < real) real = end + AHEAD;

    int n = begin + AHEAD - (K - 1);
    const long long hop = job.dilation * job.x_time;
    const number* source = job.x + row * job.x_batch + channel + phase * job.x_time + n * hop;
    float ring[K][VECTOR];
#pragma unroll
    for (int q = 0; q < K - 1; ++q) {
        Vector raw = zeros();
        if (n >= 0 && n < real) raw = *reinterpret_cast<const Vector*>(source);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) ring[q][v] = widen(raw.part[v]);
#if STATE
        if (n < 0) {
            const long long size = (K - 1) * job.dilation;
            long long slot = (job.position[row] + phase + n * job.dilation) % size;
            slot += slot < 0 ? size : 0;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v)
                ring[q][v] = widen_kept(job.past[(row * size + slot) * job.channels + channel + v]);
        }
#endif
        ++n;
        source += hop;
    }
    Vector coming[K];
#pragma unroll
    for (int u = 0; u < K; ++u) {
        coming[u] = zeros();
        if (n < real) coming[u] = *reinterpret_cast<const Vector*>(source);
        ++n;
        source += hop;
    }
    const long long y_hop = job.dilation * job.y_time;
    number* target = job.y + row * job.y_batch + channel + phase * job.y_time + begin * y_hop;
    const Dropout dropout = dropout_of(job.seed, job.layer, row, job.channels, job.dropped, job.scale);
    for (int m = begin; m < end; m += K) {
#pragma unroll
        for (int u = 0; u < K; ++u) {
            if (m + u >= end) return;
            const int newest = (K - 1 + u) % K;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) ring[newest][v] = widen(coming[u].part[v]);
            coming[u] = zeros();
            if (n < real) coming[u] = *reinterpret_cast<const Vector*>(source);
            ++n;
            source += hop;
            Vector out;
            const Draw drawn = draw_at(dropout, phase + (m + u) * job.dilation, channel);
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                // Two sums, so that half of the additions need not wait for the other half.
                float even = bias[v], odd = 0.0f;
#pragma unroll
                for (int j = 0; j < K; ++j) {
                    float& sum = j % 2 ? odd : even;
                    sum = fmaf(weight[v][j], ring[(newest - j + K) % K][v], sum);
                }
                float y = activate(even + odd);
                if (DROPOUT) y = stays(dropout, drawn, static_cast<int>(channel) + v) ? y * dropout.scale : 0.0f;
                if (RESIDUAL) y += ring[(newest - AHEAD + K) % K][v];
                out.part[v] = narrow(y);
            }
            *reinterpret_cast<Vector*>(target) = out;
            target += y_hop;
        }
    }
}
