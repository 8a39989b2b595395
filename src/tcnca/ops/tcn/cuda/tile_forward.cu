// Blocks y = x + activation(convolution(x)) on the tensor cores, `depth` of them in one launch.

struct Job {
    const number* x;
    const float* weight;
    const float* bias;
    number* y;
    number* inner;
    const long long* lengths;
    const long long* seed;
    word* counter;
    long long rows, time, channels, x_time, x_batch, dilation, factor, depth, keep, dropped;
    double scale;
    long long steps[LAYERS];
};

// The biases of a warp's channels to shared memory, and the Toeplitz matrices of their kernels to registers.
__device__ __forceinline__ void read_kernels(word (&toeplitz)[BLOCKS][PART], char* offsets, const float* weight,
                                             const float* bias, long long channel, long long channels) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    write_bias(offsets, bias, channel, channels);
#pragma unroll
    for (int c = 0; c < PART; ++c) {
        const bool real = channel + c < channels;
        const float* kernel = weight + (real ? channel + c : 0) * K;
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i)
            toeplitz[i][c] = real ? pack(OF_Z * tap(kernel, i, g, 2 * q), OF_Z * tap(kernel, i, g, 2 * q + 1)) : 0;
    }
}

__device__ __forceinline__ void forward_tile(char* shared, const Cut& cut, int tile_in_row, long long row_number,
                                             int group, const Job& job, const number* x, long long x_time,
                                             long long x_batch, const float* weight, const float* bias, number* y,
                                             int layer, word (&toeplitz)[BLOCKS][PART], int& known) {
    const Extent extent = extent_of(cut, job.time, tile_in_row);
    const int blocks = extent.blocks;
    if (blocks == 0) return;
    const long long channel = static_cast<long long>(group) * PART * WARPS;
    const Mover mover = mover_for(cut, job.time, tile_in_row, job.channels - channel);
    const int length = LENGTHS ? min(mover.limit, steps_before(job.lengths[row_number], mover.phase, cut.dilation))
                               : mover.limit;
    const int moved = base_of_mover();
    const long long hop = cut.dilation * x_time, y_hop = cut.dilation * job.channels;
    // At the start of the sequence nothing lies before the tile.
    const int start = extent.last == 0 ? 0 : -BEFORE;
    const int end = blocks + AFTER;

    const number* source = x + row_number * x_batch + channel + offset_of(mover, cut, x_time, start);
    number* target = y + row_number * job.time * job.channels + channel + offset_of(mover, cut, job.channels, 0);
    int asked = mover.begin + start * SPAN, written = mover.begin;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (start + i < end) ask(shared + i * BLOCK_BYTES, source, hop, moved, asked, length);
        source += SPAN * hop;
        asked += SPAN;
        close_group();
    }
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int mine = place(2 * q, g, warp);
    char* offsets = shared + STAGES * BLOCK_BYTES + warp * PART * 4;
    if (known != group) read_kernels(toeplitz, offsets, weight, bias, channel + warp * PART, job.channels);
    known = group;
    const Dropout dropout = dropout_of(job.seed, layer, row_number, job.channels, job.dropped, job.scale);
    Draws draws = draws_for(cut, dropout, tile_in_row, channel + warp * PART);
    word seen[BLOCKS][PART][2];
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
        for (int c = 0; c < PART; ++c) seen[i][c][0] = seen[i][c][1] = 0;

    int stage = 0;
#pragma unroll 1
    for (int base = start; base < end; base += TURNS) {
#pragma unroll
        for (int u = 0; u < TURNS; ++u) {
            const int s = base + u;
            if (s >= end) break;
            arrived<STAGES - 2>();
            __syncthreads();
            // The output of the last step lies where the next input will, and this thread empties what it fills.
            char* last = shared + (stage == 0 ? STAGES - 1 : stage - 1) * BLOCK_BYTES;
            const int base_now = veiled(moved);
            if (s > AFTER) {
                put(last, target, y_hop, base_now, written, mover.limit, mover.limit);
                target += SPAN * y_hop;
                written += SPAN;
            }
            if (s + STAGES - 1 < end) {
                ask(last, source, hop, base_now, asked, length);
                source += SPAN * hop;
                asked += SPAN;
            }
            close_group();
            char* block = shared + stage * BLOCK_BYTES;
            stage = stage == STAGES - 1 ? 0 : stage + 1;
            grow_older(seen);
            read_block(seen[u], block, mine);
            if (s < AFTER) continue;
            Four out[2][2];
            Draw drawn[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float y_pair[2][4];
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (DROPOUT && j % 2 == 0) drawn[i] = draw(dropout, draws.index[i / 2] + i % 2 * draws.hop + j / 2);
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int own = 2 * j + c;
                    const float offset = OF_Z * read_bias(offsets, own);
                    float z[4] = {offset, offset, offset, offset};
                    convolve(z, seen, seen[u], toeplitz, u, own);
                    const int center = (u - AFTER + BLOCKS) % BLOCKS;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const word pair = seen[center][own][i / 2];
                        const float skip = RESIDUAL ? (i % 2 ? second(pair) : first(pair)) : 0.0f;
                        y_pair[c][i] = activate_of(z[i], DROPOUT ? dropout.scale : 1.0f) + skip;
                        if (DROPOUT && !stays(dropout, drawn[i], own)) y_pair[c][i] = skip;
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
#pragma unroll
            for (int h = 0; h < 2; ++h) draws.index[h] += SPAN * draws.hop;
        }
    }
    __syncthreads();
    put(shared + (stage == 0 ? STAGES - 1 : stage - 1) * BLOCK_BYTES, target, y_hop, moved, written, mover.limit,
        mover.limit);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) tile_forward(const Job job) {
    extern __shared__ __align__(128) char shared[];
    const number* x = job.x;
    long long x_time = job.x_time, x_batch = job.x_batch, dilation = job.dilation;
    const int groups = static_cast<int>((job.channels + PART * WARPS - 1) / (PART * WARPS));
    const long long tensor = job.rows * job.time * job.channels;
    const int warp = threadIdx.x / 32;
    char* offsets = shared + STAGES * BLOCK_BYTES + warp * PART * 4;
    word toeplitz[BLOCKS][PART];
    int known = -1;  // the group of channels whose kernels are there
    for (int layer = 0; layer < job.depth; ++layer) {
        const int later = static_cast<int>(job.depth) - 1 - layer;
        // Without gradients to come, one tensor takes turns with the output.
        number* y = later == 0 || (!job.keep && later % 2 == 0) ? job.y : job.inner + (job.keep ? layer : 0) * tensor;
        const Cut cut = cut_time(job.time, dilation, job.steps[layer]);
        const float* weight = job.weight + layer * job.channels * K;
        const float* bias = job.bias + layer * job.channels;
        const int tiles_in_row = static_cast<int>(cut.tiles_in_row);
        const int tiles_in_group = tiles_in_row * static_cast<int>(job.rows);
        for (int tile = blockIdx.x; tile < tiles_in_group * groups; tile += gridDim.x) {
            const int group = tile / tiles_in_group, in_group = tile % tiles_in_group;
            forward_tile(shared, cut, in_group % tiles_in_row, in_group / tiles_in_row, group, job, x, x_time, x_batch,
                         weight, bias, y, layer, toeplitz, known);
        }
        x = y;
        x_time = job.channels;
        x_batch = job.time * job.channels;
        dilation = min(dilation * job.factor, job.time);
        if (later == 0) break;
        // What the next layer starts with can be read while waiting for the last tiles of this one.
        const Cut next = cut_time(job.time, dilation, job.steps[layer + 1]);
        known = static_cast<int>(blockIdx.x / (next.tiles_in_row * static_cast<word>(job.rows)));
        if (known < groups)
            read_kernels(toeplitz, offsets, weight + job.channels * K, bias + job.channels,
                         (static_cast<long long>(known) * WARPS + warp) * PART, job.channels);
        meet(job.counter, static_cast<word>(layer + 1) * gridDim.x);
    }
    if (job.depth > 1) leave(job.counter);
}
