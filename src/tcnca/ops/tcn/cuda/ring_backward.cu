// Gradients of one block y = x + activation(convolution(x)) with rings of inputs and of unfinished gradients.

struct Job {
    const number* x;
    const float* weight;
    const float* bias;
    const number* dy;
    number* dx;
    const long long* lengths;
    const long long* seed;
    float* partial;
    long long time, channels, dilation, x_time, x_batch, dy_time, dy_batch, dx_time, dx_batch, phases, segments, steps;
    long long layer, dropped;
    double scale;
};

struct SumJob {
    const float* partial;
    float* dweight;
    float* dbias;
    long long parts, channels;
};

// Gradients of the input and, summed over the block's segments, of kernels and bias.
//
// One walk along the chain: the pre-activation is computed again from the ring of inputs, its gradient flows into a
// ring of unfinished input gradients, and into the sums for the kernel.
extern "C" __global__ void __launch_bounds__(128) ring_backward(const Job job) {
    __shared__ float shared[32 * VECTOR * (K + 1)];
    share_kernels(shared, job.weight, job.channels);
    const long long channel = (static_cast<long long>(blockIdx.y) * blockDim.x + threadIdx.x) * VECTOR;
    const long long item = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    const long long row = blockIdx.z;
    const bool busy = channel < job.channels && item < job.phases * job.segments;

#if SHARED_KERNELS
#define WEIGHT(v, j) shared[(threadIdx.x * VECTOR + v) * K + j]
#else
    float weight[VECTOR][K];
#pragma unroll
    for (int v = 0; v < VECTOR; ++v)
#pragma unroll
        for (int j = 0; j < K; ++j) weight[v][j] = shared[(threadIdx.x * VECTOR + v) * K + j];
#define WEIGHT(v, j) weight[v][j]
#endif
    float bias[VECTOR], dbias[VECTOR], dweight[VECTOR][K];
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        bias[v] = BIAS && busy ? job.bias[channel + v] : 0.0f;
        dbias[v] = 0.0f;
#pragma unroll
        for (int j = 0; j < K; ++j) dweight[v][j] = 0.0f;
    }
    if (busy) {
        const long long phase = item % job.phases;
        const int begin = static_cast<int>(item / job.phases * job.steps);
        const int chain = steps_before(job.time, phase, job.dilation);
        const int end = begin + job.steps < chain ? static_cast<int>(begin + job.steps) : chain;
        const int length = steps_before(LENGTHS ? job.lengths[row] : job.time, phase, job.dilation);
        // dz is needed from begin - AHEAD to before `last`, x and dy no further than that asks for.
        const int last = end + K - 1 - AHEAD;
        const int real = last + AHEAD < length ? last + AHEAD : length;
        const int real_dy = last < chain ? last : chain;

        int n = begin - (K - 1);
        const long long hop = job.dilation * job.x_time;
        const number* source = job.x + row * job.x_batch + channel + phase * job.x_time + n * hop;
        float ring[SLOTS][VECTOR], dx[SLOTS][VECTOR];
#pragma unroll
        for (int q = 0; q < SLOTS; ++q)
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) ring[q][v] = dx[q][v] = 0.0f;
#pragma unroll
        for (int q = 0; q < K - 1; ++q) {
            Vector raw = zeros();
            if (n >= 0 && n < real) raw = *reinterpret_cast<const Vector*>(source);
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) ring[q][v] = widen(raw.part[v]);
            ++n;
            source += hop;
        }
        int r = begin - AHEAD;
        const long long dy_hop = job.dilation * job.dy_time;
        const number* slopes = job.dy + row * job.dy_batch + channel + phase * job.dy_time + r * dy_hop;
        Vector coming[UNROLL], coming_dy[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            coming[u] = coming_dy[u] = zeros();
            if (n >= 0 && n < real) coming[u] = *reinterpret_cast<const Vector*>(source);
            if (r >= 0 && r < real_dy) coming_dy[u] = *reinterpret_cast<const Vector*>(slopes);
            ++n;
            ++r;
            source += hop;
            slopes += dy_hop;
        }
        const long long dx_hop = job.dilation * job.dx_time;
        number* target = job.dx + row * job.dx_batch + channel + phase * job.dx_time + begin * dx_hop;
        const Dropout dropout = dropout_of(job.seed, job.layer, row, job.channels, job.dropped, job.scale);
        const int from = begin - AHEAD;
        for (int m = from; m < last; m += UNROLL) {
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (m + u >= last) break;
                const int newest = (K - 1 + u) % SLOTS;
                const bool own = m + u >= begin && m + u < end;
                const int done = m + u + AHEAD - (K - 1);
                Vector out;
                const Draw drawn = draw_at(dropout, phase + (m + u) * job.dilation, channel);
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) {
                    ring[newest][v] = widen(coming[u].part[v]);
                    const float dy = widen(coming_dy[u].part[v]);
                    float even = bias[v], odd = 0.0f;
#pragma unroll
                    for (int j = 0; j < K; ++j) {
                        float& sum = j % 2 ? odd : even;
                        sum = fmaf(WEIGHT(v, j), ring[(newest - j + SLOTS) % SLOTS][v], sum);
                    }
                    float dz = dy * slope(even + odd);
                    if (DROPOUT) dz = stays(dropout, drawn, static_cast<int>(channel) + v) ? dz * dropout.scale : 0.0f;
                    const float counted = own ? dz : 0.0f;
                    if (BIAS) dbias[v] += counted;
                    dx[newest][v] = 0.0f;
#pragma unroll
                    for (int j = 0; j < K; ++j) {
                        const int slot = (newest - j + SLOTS) % SLOTS;
                        dweight[v][j] = fmaf(counted, ring[slot][v], dweight[v][j]);
                        dx[slot][v] = fmaf(WEIGHT(v, j), dz, dx[slot][v]);
                    }
                    if (RESIDUAL) dx[(newest - AHEAD + SLOTS) % SLOTS][v] += dy;
                    const float ready = dx[(newest - (K - 1) + SLOTS) % SLOTS][v];
                    out.part[v] = narrow(!LENGTHS || done < length ? ready : 0.0f);
                }
                if (done >= begin && done < end) {
                    *reinterpret_cast<Vector*>(target) = out;
                    target += dx_hop;
                }
                coming[u] = coming_dy[u] = zeros();
                if (n >= 0 && n < real) coming[u] = *reinterpret_cast<const Vector*>(source);
                if (r >= 0 && r < real_dy) coming_dy[u] = *reinterpret_cast<const Vector*>(slopes);
                ++n;
                ++r;
                source += hop;
                slopes += dy_hop;
            }
            // A long kernel's ring would make too long a loop: its values move instead.
#pragma unroll
            for (int q = 0; SLOTS != UNROLL && q < K - 1; ++q)
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) {
                    ring[q][v] = ring[q + UNROLL][v];
                    dx[q][v] = dx[q + UNROLL][v];
                }
        }
    }
    // The block's rows add up one after the other: the same order, and so the same bits, in every run.
    for (int turn = 0; turn < blockDim.y; ++turn) {
        __syncthreads();
        if (threadIdx.y != turn) continue;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            float* sums = shared + (threadIdx.x * VECTOR + v) * (K + 1);
#pragma unroll
            for (int j = 0; j < K; ++j) sums[j] = turn ? sums[j] + dweight[v][j] : dweight[v][j];
            sums[K] = turn ? sums[K] + dbias[v] : dbias[v];
        }
    }
    __syncthreads();
    const long long left = job.channels - static_cast<long long>(blockIdx.y) * blockDim.x * VECTOR;
    const int here = static_cast<int>(left < blockDim.x * VECTOR ? left : blockDim.x * VECTOR) * (K + 1);
    const long long part = static_cast<long long>(blockIdx.z) * gridDim.x + blockIdx.x;
    float* target = job.partial + (part * job.channels + blockIdx.y * blockDim.x * VECTOR) * (K + 1);
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < here; i += blockDim.x * blockDim.y) target[i] = shared[i];
}

// Partial sums [parts, channels, K + 1] to the gradients of kernels and bias, in an order that never changes.
extern "C" __global__ void __launch_bounds__(1024) add_up(const SumJob job) {
    __shared__ float shared[32][33];
    const long long width = job.channels * (K + 1);
    const long long column = static_cast<long long>(blockIdx.x) * 32 + threadIdx.x;
    float sum = 0.0f;
    const long long parts = column < width ? job.parts : 0;
#pragma unroll 8
    for (long long part = threadIdx.y; part < parts; part += 32) sum += job.partial[part * width + column];
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= width) return;
#pragma unroll
    for (int i = 1; i < 32; ++i) sum += shared[i][threadIdx.x];
    const long long channel = column / (K + 1);
    const int tap = static_cast<int>(column % (K + 1));
    if (tap < K) job.dweight[channel * K + tap] = sum;
    else if (BIAS) job.dbias[channel] = sum;
}
