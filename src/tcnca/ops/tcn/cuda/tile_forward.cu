// Blocks y = x + activation(convolution(x)) on the tensor cores, `depth` of them in one launch.

struct Job {
    const number* x;
    const float* weight;
    const float* bias;
    number* y;
    number* inner;
    const long long* lengths;
    word* counter;
    long long rows, time, channels, x_time, x_batch, dilation, factor, depth, slots, steps[LAYERS];
};

__device__ __forceinline__ void forward_tile(char* shared, const Cut& cut, int tile_in_row, long long row_number,
                                             long long channel, const Job& job, const number* x, long long x_time,
                                             long long x_batch, const float* weight, const float* bias, number* y,
                                             word (&toeplitz)[BLOCKS][PART], bool& known) {
    const Mover mover = mover_for(cut, job.time, tile_in_row, job.channels - channel);
    const int length = LENGTHS ? min(mover.limit, steps_before(job.lengths[row_number], mover.phase, cut.dilation))
                               : mover.limit;
    const long long hop = cut.dilation * x_time, y_hop = cut.dilation * job.channels;
    const int first_segment = static_cast<int>(tile_in_row * CHAINS / cut.dilation);
    const int last_segment = static_cast<int>((tile_in_row * CHAINS + CHAINS - 1) / cut.dilation);
    const int steps = static_cast<int>(cut.steps), left = static_cast<int>(cut.chain) - first_segment * steps;
    const int blocks = ((left < steps ? left : steps) + SPAN - 1) / SPAN;
    // At the start of the sequence nothing lies before the tile.
    const int start = last_segment == 0 ? 0 : -BEFORE;
    const int end = blocks + AFTER;

    const number* source = x + row_number * x_batch + channel + offset_of(mover, cut, x_time, start);
    number* target = y + row_number * job.time * job.channels + channel + offset_of(mover, cut, job.channels, 0);
    int asked = mover.begin + start * SPAN, written = mover.begin;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (start + i < end) ask(shared + i * BLOCK_BYTES, source, hop, mover.base, asked, length);
        source += SPAN * hop;
        asked += SPAN;
        close_group();
    }
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int mine = place(2 * q, g, warp);
    char* offsets = shared + STAGES * BLOCK_BYTES + warp * PART * 4;
    if (!known) {
        known = true;
        write_bias(offsets, bias, channel + warp * PART, job.channels);
#pragma unroll
        for (int c = 0; c < PART; ++c) {
            const long long own = channel + warp * PART + c;
            const bool real = own < job.channels;
            const float* kernel = weight + (real ? own : 0) * K;
#pragma unroll
            for (int i = 0; i < BLOCKS; ++i)
                toeplitz[i][c] = real ? pack(tap(kernel, i, g, 2 * q), tap(kernel, i, g, 2 * q + 1)) : 0;
        }
    }
    word seen[BLOCKS][PART][2];
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
        for (int c = 0; c < PART; ++c) seen[i][c][0] = seen[i][c][1] = 0;

    int stage = 0;
    for (int base = start; base < end; base += BLOCKS) {
#pragma unroll
        for (int u = 0; u < BLOCKS; ++u) {
            const int s = base + u;
            if (s >= end) break;
            arrived<STAGES - 2>();
            __syncthreads();
            if (s + STAGES - 1 < end) {
                const int next = stage == 0 ? STAGES - 1 : stage - 1;
                ask(shared + next * BLOCK_BYTES, source, hop, mover.base, asked, length);
                source += SPAN * hop;
                asked += SPAN;
            }
            close_group();
            char* block = shared + stage * BLOCK_BYTES;
            stage = stage == STAGES - 1 ? 0 : stage + 1;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const Four even = read_four(block + beside(mine, 0, h));
                const Four odd = read_four(block + beside(mine, 1, h));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    seen[u][2 * j][h] = lows(even.part[j], odd.part[j]);
                    seen[u][2 * j + 1][h] = highs(even.part[j], odd.part[j]);
                }
            }
            if (s < AFTER) continue;
            Four out[2][2];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float y_pair[2][4];
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int own = 2 * j + c;
                    const float offset = read_bias(offsets, own);
                    float z[4] = {offset, offset, offset, offset};
                    convolve(z, seen, toeplitz, u, own);
                    const int centre = (u - AFTER + BLOCKS) % BLOCKS;
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        y_pair[c][2 * h] = activate(z[2 * h]);
                        y_pair[c][2 * h + 1] = activate(z[2 * h + 1]);
                        if (RESIDUAL) {
                            y_pair[c][2 * h] += first(seen[centre][own][h]);
                            y_pair[c][2 * h + 1] += second(seen[centre][own][h]);
                        }
                    }
                }
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd)
                        out[odd][h].part[j] = pack(y_pair[0][2 * h + odd], y_pair[1][2 * h + odd]);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int odd = 0; odd < 2; ++odd)
                    write_four(block + beside(mine, odd, h), out[odd][h]);
            __syncthreads();
            put(block, target, y_hop, mover.base, written, mover.limit, mover.limit);
            target += SPAN * y_hop;
            written += SPAN;
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) tile_forward(const Job job) {
    extern __shared__ __align__(128) char shared[];
    const number* x = job.x;
    long long x_time = job.x_time, x_batch = job.x_batch, dilation = job.dilation;
    const int groups = static_cast<int>((job.channels + PART * WARPS - 1) / (PART * WARPS));
    const long long tensor = job.rows * job.time * job.channels;
    for (int layer = 0; layer < job.depth; ++layer) {
        number* y = layer + 1 == job.depth ? job.y : job.inner + layer % job.slots * tensor;
        const Cut cut = cut_time(job.time, dilation, job.steps[layer]);
        const float* weight = job.weight + layer * job.channels * K;
        const float* bias = job.bias + layer * job.channels;
        word toeplitz[BLOCKS][PART];
        bool known = false;
        int group_known = -1;
        const int tiles_in_group = static_cast<int>(cut.tiles_in_row * job.rows);
        for (int tile = blockIdx.x; tile < tiles_in_group * groups; tile += gridDim.x) {
            const int group = tile / tiles_in_group, in_group = tile % tiles_in_group;
            known = known && group == group_known;
            group_known = group;
            forward_tile(shared, cut, in_group % static_cast<int>(cut.tiles_in_row),
                         in_group / static_cast<int>(cut.tiles_in_row),
                         static_cast<long long>(group) * PART * WARPS, job, x, x_time, x_batch, weight, bias, y,
                         toeplitz, known);
        }
        if (layer + 1 < job.depth) meet(job.counter, static_cast<word>(layer + 1) * gridDim.x);
        x = y;
        x_time = job.channels;
        x_batch = job.time * job.channels;
        dilation = min(dilation * job.factor, job.time);
    }
    if (job.depth > 1) leave(job.counter);
}
