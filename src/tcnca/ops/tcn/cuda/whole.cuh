// Short sequences: a block of threads holds a channel's whole sequence in shared memory, and runs all layers there.
//
// Eight blocks, a cluster, share eight neighboring channels. Each fetches an eighth of the times, 16 or 32 bytes a
// time, and hands every channel to the block that owns it; in the end it collects its times from all of them.
//
// A thread computes OUTS outputs of one chain t = phase + dilation · n. OUTS is odd, so that lanes that lie OUTS steps
// apart meet in no bank.

#define CLUSTER 8
#define OUTS 9
#define WINDOW (K + OUTS - 1)

#if DTYPE == 0
typedef float number;
#else
typedef unsigned short number;
#endif

// All channels of the cluster at one time.
__device__ __forceinline__ void read_row(float (&to)[CLUSTER], const number* from) {
    const char* bytes = reinterpret_cast<const char*>(from);
#if DTYPE == 0
    const Four low = read_four(bytes), high = read_four(bytes + 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[i] = __uint_as_float(low.part[i]);
        to[4 + i] = __uint_as_float(high.part[i]);
    }
#else
    const Four v = read_four(bytes);
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
        Four v;
#pragma unroll
        for (int i = 0; i < 4; ++i) v.part[i] = __float_as_uint(from[4 * half + i]);
        write_out(to + 4 * half, v);
    }
#else
    Four v;
#pragma unroll
    for (int i = 0; i < 4; ++i) v.part[i] = pack(from[2 * i], from[2 * i + 1]);
    write_out(to, v);
#endif
}

// This block's times.
struct Times {
    int begin, end;
};

__device__ __forceinline__ Times times_of(int time) {
    const int rank = blockIdx.x % CLUSTER, each = (time + CLUSTER - 1) / CLUSTER;
    return {rank * each, min((rank + 1) * each, time)};
}

// One time of all channels to the blocks that own them.
__device__ __forceinline__ void hand_out(float* sequence, const float (&row)[CLUSTER], int t) {
#pragma unroll
    for (int c = 0; c < CLUSTER; ++c) beside_in(sequence, c)[t] = row[c];
}

// This block's times from all owners.
__device__ __forceinline__ void gather(number* to, long long stride, float* sequence, const Times& times) {
    for (int t = times.begin + threadIdx.x; t < times.end; t += THREADS) {
        float row[CLUSTER];
#pragma unroll
        for (int c = 0; c < CLUSTER; ++c) row[c] = beside_in(sequence, c)[t];
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

// WINDOW values of a chain, the first at time t; zeros outside 0 to limit.
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

// So many threads' outputs make all of the sequence.
__device__ __forceinline__ int items_of(int time, int dilation) {
    const int chain = (time + dilation - 1) / dilation;
    return (chain + OUTS - 1) / OUTS * dilation;
}

// The time of the first of them.
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

__device__ __forceinline__ float kept_of(const Dropout& dropout, int t, long long channel) {
    if (!DROPOUT) return 1.0f;
    // Of the draw just the channel's own pair: what the second one takes does nothing to the first.
    const word own = static_cast<word>(channel), second = own & 2;
    word pair = first_pair(dropout, static_cast<word>(t) * dropout.fours + own / 4) * (second ? NEXT_PAIR : 1u);
    pair ^= pair >> 16 & (second ? 0xffffffffu : 0u);
    return pair << (own & 1 ? 0 : 16) >= dropout.dropped ? dropout.scale : 0.0f;
}

// One layer from one sequence to another.
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
            if (DROPOUT) y *= kept_of(dropout, at, channel);
            if (RESIDUAL) y += window[o + K - 1 - AHEAD];
            if (at < time) to[at] = y;
        }
    }
}
