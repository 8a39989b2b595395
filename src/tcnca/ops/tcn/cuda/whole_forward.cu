// Blocks y = x + activation(convolution(x)) of a short sequence, `depth` of them in shared memory.

struct Job {
    const number* x;
    const float* weight;
    const float* bias;
    number* y;
    number* inner;
    const long long* lengths;
    const long long* seed;
    long long time, channels, x_time, x_batch, dilation, factor, depth, keep, dropped;
    double scale;
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1) whole_forward(const Job job) {
    extern __shared__ __align__(128) char shared[];
    const int time = static_cast<int>(job.time), depth = static_cast<int>(job.depth);
    const long long row = blockIdx.y, group = blockIdx.x / CLUSTER * CLUSTER, channel = blockIdx.x;
    float* from = reinterpret_cast<float*>(shared);
    float* to = from + time;
    float* kernels = to + time;
    const int length = LENGTHS ? static_cast<int>(job.lengths[row]) : time;
    const Times times = times_of(time);
    const number* source = job.x + row * job.x_batch + group;
    reach_cluster();  // nobody writes into a block that has not started
#pragma unroll 1
    for (int t = times.begin + threadIdx.x; t < times.end; t += THREADS) expect(source + t * job.x_time);
    read_kernels(kernels, job.weight, job.bias, channel, job.channels, depth);
    await_cluster();
    for (int t = times.begin + threadIdx.x; t < times.end; t += THREADS) {
        float x[CLUSTER];
        read_row(x, source + t * job.x_time);
        hand_out(from, x, t);
    }
    meet_cluster();
    long long dilation = job.dilation;
    for (int layer = 0; layer < depth; ++layer) {
        const Dropout dropout = dropout_of(job.seed, layer, row, job.channels, job.dropped, job.scale);
        forward_layer(to, from, kernels + layer * (K + 1), time, length, static_cast<int>(dilation), dropout, channel);
        __syncthreads();
        float* done = to;
        to = from;
        from = done;
        dilation = min(dilation * job.factor, job.time);
        const bool last = layer + 1 == depth;
        if (!last && !job.keep) continue;
        // The others read what this layer wrote while the next layer writes to the other place, and are done with it
        // when they meet again.
        meet_cluster();
        number* target = last ? job.y : job.inner + layer * gridDim.y * job.time * job.channels;
        gather(target + row * job.time * job.channels + group, job.channels, from, times);
    }
    meet_cluster();  // nobody leaves while others read
}
