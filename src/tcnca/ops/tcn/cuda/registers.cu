// One block y = x + activation(convolution(x)) and its gradients, with the last inputs in a ring of registers.
//
// A thread owns VECTOR neighboring channels of one chain t = phase + dilation · n, over a segment of `steps` outputs
// of it. Every input is loaded once, many steps before it is needed. Ring slots are known when compiling,
// because the loop over time is unrolled as often as the ring has slots.

#if DTYPE == 0
__device__ __forceinline__ float widen(number x) { return x; }
__device__ __forceinline__ number narrow(float x) { return x; }
#else
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

// The number of steps of the chain of `phase` before time `end`.
__device__ __forceinline__ int steps_before(long long end, long long phase, long long dilation) {
    return end <= phase ? 0 : static_cast<int>((end - phase + dilation - 1) / dilation);
}

// Read the kernels of the block's channels into shared memory, coalesced; threads copy theirs to registers.
__device__ __forceinline__ void share_kernels(float* shared, const float* weight, long long channels) {
    const long long from = static_cast<long long>(blockIdx.y) * blockDim.x * VECTOR;
    const long long left = channels - from;
    const int here = static_cast<int>(left < blockDim.x * VECTOR ? left : blockDim.x * VECTOR) * K;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < here; i += blockDim.x * blockDim.y)
        shared[i] = weight[from * K + i];
    __syncthreads();
}

#if FORWARD
// STATE: whether the inputs before the first one come from a state's ring buffer, whose dtype is PAST.
#if PAST == 0
typedef float past_number;
__device__ __forceinline__ float widen_past(past_number x) { return x; }
#elif PAST == DTYPE
typedef number past_number;
__device__ __forceinline__ float widen_past(past_number x) { return widen(x); }
#endif

struct Args {
    const number* x;
    const float* weight;
    const float* bias;
    number* y;
    const long long* lengths;
    const long long* seed;
    const past_number* past;
    const long long* position;
    const number* input;
    const float* omega;
    long long time, channels, dilation, x_time, x_batch, y_time, y_batch, input_time, input_batch;
    long long phases, segments, steps, layer, dropped;
    double scale;
};

extern "C" __global__ void __launch_bounds__(128) registers_forward(const Args args) {
    __shared__ float shared[32 * VECTOR * K];
    share_kernels(shared, args.weight, args.channels);
    const long long channel = (static_cast<long long>(blockIdx.y) * blockDim.x + threadIdx.x) * VECTOR;
    const long long item = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    const long long row = blockIdx.z;
    if (channel >= args.channels || item >= args.phases * args.segments) return;

    float weight[VECTOR][K], bias[VECTOR];
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        bias[v] = BIAS ? args.bias[channel + v] : 0.0f;
#pragma unroll
        for (int j = 0; j < K; ++j) weight[v][j] = shared[(threadIdx.x * VECTOR + v) * K + j];
    }
    const long long phase = item % args.phases;
    const int begin = static_cast<int>(item / args.phases * args.steps);
    int end = steps_before(args.time, phase, args.dilation);
    if (begin + args.steps < end) end = static_cast<int>(begin + args.steps);
    const int length = steps_before(LENGTHS ? args.lengths[row] : args.time, phase, args.dilation);
    const int real = end + AHEAD < length ? end + AHEAD : length;

    int n = begin + AHEAD - (K - 1);
    const long long hop = args.dilation * args.x_time;
    const number* source = args.x + row * args.x_batch + channel + phase * args.x_time + n * hop;
    float ring[K][VECTOR];
#pragma unroll
    for (int q = 0; q < K - 1; ++q) {
        Vector raw = zeros();
        if (n >= 0 && n < real) raw = *reinterpret_cast<const Vector*>(source);
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) ring[q][v] = widen(raw.part[v]);
#if STATE
        if (n < 0) {
            const long long size = (K - 1) * args.dilation;
            long long slot = (args.position[row] + phase + n * args.dilation) % size;
            slot += slot < 0 ? size : 0;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v)
                ring[q][v] = widen_past(args.past[(row * size + slot) * args.channels + channel + v]);
        }
#endif
        ++n;
        source += hop;
    }
    Vector ahead[K];
#pragma unroll
    for (int u = 0; u < K; ++u) {
        ahead[u] = zeros();
        if (n < real) ahead[u] = *reinterpret_cast<const Vector*>(source);
        ++n;
        source += hop;
    }
    const long long y_hop = args.dilation * args.y_time;
    number* target = args.y + row * args.y_batch + channel + phase * args.y_time + begin * y_hop;
    const Dropout dropout = dropout_of(args.seed, args.layer, row, args.channels, args.dropped, args.scale);
#if OMEGA
    const long long input_hop = args.dilation * args.input_time;
    const number* input = args.input + row * args.input_batch + channel + phase * args.input_time + begin * input_hop;
    Vector next = zeros();
    if (begin < length) next = *reinterpret_cast<const Vector*>(input);
    float omega[VECTOR];
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) omega[v] = args.omega[channel + v];
#endif
    for (int m = begin; m < end; m += K) {
#pragma unroll
        for (int u = 0; u < K; ++u) {
            if (m + u >= end) return;
            const int newest = (K - 1 + u) % K;
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) ring[newest][v] = widen(ahead[u].part[v]);
            ahead[u] = zeros();
            if (n < real) ahead[u] = *reinterpret_cast<const Vector*>(source);
            ++n;
            source += hop;
            Vector out;
            const Draw drawn = draw_at(dropout, phase + (m + u) * args.dilation, channel);
#if OMEGA
            const Vector now = next;
            next = zeros();
            input += input_hop;
            if (m + u + 1 < length) next = *reinterpret_cast<const Vector*>(input);
#endif
#pragma unroll
            for (int v = 0; v < VECTOR; ++v) {
                // Two sums, which the processor can compute in parallel.
                float even = bias[v], odd = 0.0f;
#pragma unroll
                for (int j = 0; j < K; ++j) {
                    float& sum = j % 2 ? odd : even;
                    sum = fmaf(weight[v][j], ring[(newest - j + K) % K][v], sum);
                }
                float y = activate(even + odd);
                if (DROPOUT) y = is_kept(dropout, drawn, static_cast<int>(channel) + v) ? y * dropout.scale : 0.0f;
                if (RESIDUAL) y += ring[(newest - AHEAD + K) % K][v];
#if OMEGA
                y = fmaf(omega[v], widen(now.part[v]), y);
#endif
                out.part[v] = narrow(y);
            }
            *reinterpret_cast<Vector*>(target) = out;
            target += y_hop;
        }
    }
}
#else
struct Args {
    const number* x;
    const float* weight;
    const float* bias;
    const number* dy;
    number* dx;
    const long long* lengths;
    const long long* seed;
    float* partial;
    const number* output_dy;
    const float* omega;
    long long time, channels, dilation, x_time, x_batch, dy_time, dy_batch, dx_time, dx_batch, output_time, output_batch;
    long long phases, segments, steps, layer, dropped;
    double scale;
};

struct SumArgs {
    const float* partial;
    float* dweight;
    float* dbias;
    float* domega;
    long long parts, channels;
};

#define COLUMNS (K + 1 + OMEGA)  // of the partial sums of a channel: kernel, bias, omega

// Gradients of the input and, summed over the block's segments, of kernels and bias.
//
// One pass along the chain recomputes the pre-activation from the ring of inputs, and adds its gradient to a ring of
// unfinished input gradients and to the sums for the kernel.
extern "C" __global__ void __launch_bounds__(128) registers_backward(const Args args) {
    __shared__ float shared[32 * VECTOR * COLUMNS];
    share_kernels(shared, args.weight, args.channels);
    const long long channel = (static_cast<long long>(blockIdx.y) * blockDim.x + threadIdx.x) * VECTOR;
    const long long item = static_cast<long long>(blockIdx.x) * blockDim.y + threadIdx.y;
    const long long row = blockIdx.z;
    const bool busy = channel < args.channels && item < args.phases * args.segments;

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
#if OMEGA
    float domega[VECTOR];
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) domega[v] = 0.0f;
#endif
#pragma unroll
    for (int v = 0; v < VECTOR; ++v) {
        bias[v] = BIAS && busy ? args.bias[channel + v] : 0.0f;
        dbias[v] = 0.0f;
#pragma unroll
        for (int j = 0; j < K; ++j) dweight[v][j] = 0.0f;
    }
    if (busy) {
        const long long phase = item % args.phases;
        const int begin = static_cast<int>(item / args.phases * args.steps);
        const int chain = steps_before(args.time, phase, args.dilation);
        const int end = begin + args.steps < chain ? static_cast<int>(begin + args.steps) : chain;
        const int length = steps_before(LENGTHS ? args.lengths[row] : args.time, phase, args.dilation);
        // dz is needed from begin - AHEAD to before `last`, x and dy only as far as these need them.
        const int last = end + K - 1 - AHEAD;
        const int real = last + AHEAD < length ? last + AHEAD : length;
        const int real_dy = last < chain ? last : chain;

        int n = begin - (K - 1);
        const long long hop = args.dilation * args.x_time;
        const number* source = args.x + row * args.x_batch + channel + phase * args.x_time + n * hop;
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
        const long long dy_hop = args.dilation * args.dy_time;
        const number* dy_source = args.dy + row * args.dy_batch + channel + phase * args.dy_time + r * dy_hop;
        Vector ahead[UNROLL], ahead_dy[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            ahead[u] = ahead_dy[u] = zeros();
            if (n >= 0 && n < real) ahead[u] = *reinterpret_cast<const Vector*>(source);
            if (r >= 0 && r < real_dy) ahead_dy[u] = *reinterpret_cast<const Vector*>(dy_source);
            ++n;
            ++r;
            source += hop;
            dy_source += dy_hop;
        }
        const long long dx_hop = args.dilation * args.dx_time;
        number* target = args.dx + row * args.dx_batch + channel + phase * args.dx_time + begin * dx_hop;
        const Dropout dropout = dropout_of(args.seed, args.layer, row, args.channels, args.dropped, args.scale);
        const int from = begin - AHEAD;
#if OMEGA
        const long long output_hop = args.dilation * args.output_time;
        const number* output_dy =
            args.output_dy + row * args.output_batch + channel + phase * args.output_time + begin * output_hop;
        Vector next = zeros();
        if (begin < end) next = *reinterpret_cast<const Vector*>(output_dy);
        float omega[VECTOR];
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) omega[v] = args.omega[channel + v];
#endif
        for (int m = from; m < last; m += UNROLL) {
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                if (m + u >= last) break;
                const int newest = (K - 1 + u) % SLOTS;
                const bool own = m + u >= begin && m + u < end;
                const int done = m + u + AHEAD - (K - 1);
                Vector out;
                const Draw drawn = draw_at(dropout, phase + (m + u) * args.dilation, channel);
#if OMEGA
                const Vector now = next;
                if (done >= begin) {
                    next = zeros();
                    output_dy += output_hop;
                    if (done + 1 < end) next = *reinterpret_cast<const Vector*>(output_dy);
                }
#endif
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) {
                    ring[newest][v] = widen(ahead[u].part[v]);
                    const float dy = widen(ahead_dy[u].part[v]);
                    float even = bias[v], odd = 0.0f;
#pragma unroll
                    for (int j = 0; j < K; ++j) {
                        float& sum = j % 2 ? odd : even;
                        sum = fmaf(WEIGHT(v, j), ring[(newest - j + SLOTS) % SLOTS][v], sum);
                    }
                    float dz = dy * activation_grad(even + odd);
                    if (DROPOUT)
                        dz = is_kept(dropout, drawn, static_cast<int>(channel) + v) ? dz * dropout.scale : 0.0f;
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
                    float ready = dx[(newest - (K - 1) + SLOTS) % SLOTS][v];
#if OMEGA
                    // The oldest input is that of the finished gradient.
                    const float added = done >= begin && done < end ? widen(now.part[v]) : 0.0f;
                    domega[v] = fmaf(added, ring[(newest - (K - 1) + SLOTS) % SLOTS][v], domega[v]);
                    ready = fmaf(omega[v], added, ready);
#endif
                    out.part[v] = narrow(!LENGTHS || done < length ? ready : 0.0f);
                }
                if (done >= begin && done < end) {
                    *reinterpret_cast<Vector*>(target) = out;
                    target += dx_hop;
                }
                ahead[u] = ahead_dy[u] = zeros();
                if (n >= 0 && n < real) ahead[u] = *reinterpret_cast<const Vector*>(source);
                if (r >= 0 && r < real_dy) ahead_dy[u] = *reinterpret_cast<const Vector*>(dy_source);
                ++n;
                ++r;
                source += hop;
                dy_source += dy_hop;
            }
            // The loop over a long kernel's ring would be too long to unroll: its values are moved instead.
#pragma unroll
            for (int q = 0; SLOTS != UNROLL && q < K - 1; ++q)
#pragma unroll
                for (int v = 0; v < VECTOR; ++v) {
                    ring[q][v] = ring[q + UNROLL][v];
                    dx[q][v] = dx[q + UNROLL][v];
                }
        }
    }
    // Add the block's rows one after the other: the same order, and so the same bits, in every run.
    for (int turn = 0; turn < blockDim.y; ++turn) {
        __syncthreads();
        if (threadIdx.y != turn) continue;
#pragma unroll
        for (int v = 0; v < VECTOR; ++v) {
            float* sums = shared + (threadIdx.x * VECTOR + v) * COLUMNS;
#pragma unroll
            for (int j = 0; j < K; ++j) sums[j] = turn ? sums[j] + dweight[v][j] : dweight[v][j];
            sums[K] = turn ? sums[K] + dbias[v] : dbias[v];
#if OMEGA
            sums[K + 1] = turn ? sums[K + 1] + domega[v] : domega[v];
#endif
        }
    }
    __syncthreads();
    const long long left = args.channels - static_cast<long long>(blockIdx.y) * blockDim.x * VECTOR;
    const int here = static_cast<int>(left < blockDim.x * VECTOR ? left : blockDim.x * VECTOR) * COLUMNS;
    const long long part = static_cast<long long>(blockIdx.z) * gridDim.x + blockIdx.x;
    float* target = args.partial + (part * args.channels + blockIdx.y * blockDim.x * VECTOR) * COLUMNS;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < here; i += blockDim.x * blockDim.y) target[i] = shared[i];
}

// Add partial sums [parts, channels, COLUMNS] to the gradients of kernels, bias and omega, in a fixed order.
extern "C" __global__ void __launch_bounds__(1024) sum_partials(const SumArgs args) {
    __shared__ float shared[32][33];
    const long long width = args.channels * COLUMNS;
    const long long column = static_cast<long long>(blockIdx.x) * 32 + threadIdx.x;
    float sum = 0.0f;
    const long long parts = column < width ? args.parts : 0;
#pragma unroll 8
    for (long long part = threadIdx.y; part < parts; part += 32) sum += args.partial[part * width + column];
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || column >= width) return;
#pragma unroll
    for (int i = 1; i < 32; ++i) sum += shared[i][threadIdx.x];
    const long long channel = column / COLUMNS;
    const int tap = static_cast<int>(column % COLUMNS);
    if (tap < K) args.dweight[channel * K + tap] = sum;
    else if (BIAS && tap == K) args.dbias[channel] = sum;
    else if (OMEGA && tap == K + 1) args.domega[channel] = sum;
}
#endif
