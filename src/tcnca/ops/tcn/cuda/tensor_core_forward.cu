// `depth` blocks y = x + activation(convolution(x)) on the tensor cores, in one launch.

struct Args {
    const number* x;
    const float* weight;
    const float* bias;
    number* y;
    number* inner;
    const long long* lengths;
    const long long* seed;
    const float* omega;
    word* counter;
    long long rows, time, channels, x_time, x_batch, dilation, factor, depth, keep, dropped;
    double scale;
    long long steps[LAYERS];
};

// Read the biases of a warp's channels to shared memory, and the Toeplitz matrices of their kernels to registers.
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
            toeplitz[i][c] =
                real ? pack(Z_SCALE * tap(kernel, i, g, 2 * q), Z_SCALE * tap(kernel, i, g, 2 * q + 1)) : 0;
    }
}

// The input of the first block, times omega, that is added to the output of the last one. A thread loads and adds the
// pieces that it stores, a step before.
#define ADDED (STAGES - 1)
#define ADDED_AT (STAGES * BLOCK_BYTES + WARPS * PART * 4)

struct Added {
    const number* source;
    const float* omega;
    long long hop;
    int step, length;
};

__device__ __forceinline__ void load_added(char* block, Added& added, int base) {
    load_block(block, added.source, added.hop, base, added.step, added.length);
    added.source += SPAN * added.hop;
    added.step += SPAN;
}

// Add it to a block, just before that is stored.
__device__ __forceinline__ void add_input(char* block, const char* added, const float* omega, int base) {
    float scale[PART];
#pragma unroll
    for (int c = 0; c < PART; ++c) scale[c] = omega[c];
#pragma unroll
    for (int i = 0; i < SPAN; i += STEPS_AT_ONCE) {
        Bytes16 v = load16(block + place_offset(base, i, 0));
        const Bytes16 x = load16(added + place_offset(base, i, 0));
#pragma unroll
        for (int j = 0; j < 4; ++j)
            v.part[j] = pack(fmaf(scale[2 * j], first(x.part[j]), first(v.part[j])),
                             fmaf(scale[2 * j + 1], second(x.part[j]), second(v.part[j])));
        store16(block + place_offset(base, i, 0), v);
    }
}

__device__ __forceinline__ void forward_tile(char* shared, const Cut& cut, int tile_in_row, long long row_number,
                                             int group, const Args& args, const number* x, long long x_time,
                                             long long x_batch, const float* weight, const float* bias, number* y,
                                             int layer, word (&toeplitz)[BLOCKS][PART], int& loaded_group) {
    const Extent extent = extent_of(cut, args.time, tile_in_row);
    const int blocks = extent.blocks;
    if (blocks == 0) return;
    const long long channel = static_cast<long long>(group) * PART * PARTS;
    const Mover mover = mover_for(cut, args.time, tile_in_row, args.channels - channel);
    const int length = LENGTHS ? min(mover.limit, steps_before(args.lengths[row_number], mover.phase, cut.dilation))
                               : mover.limit;
    const int moved = base_of_mover();
    const long long hop = cut.dilation * x_time, y_hop = cut.dilation * args.channels;
    // There is nothing before the start of the sequence.
    const int start = extent.last == 0 ? 0 : -BEFORE;
    const int end = blocks + AFTER;

    const number* source = x + row_number * x_batch + channel + offset_of(mover, cut, x_time, start);
    number* target = y + row_number * args.time * args.channels + channel + offset_of(mover, cut, args.channels, 0);
    int loaded = mover.begin + start * SPAN, written = mover.begin;
    // Step s stores block s - AFTER - 1, for which the input is loaded together with block s.
    const bool adds = OMEGA && layer + 1 == args.depth;
    char* added_blocks = shared + ADDED_AT;
    int added_slot = 0;
    Added added;
    if (adds) {
        added.hop = cut.dilation * args.x_time;
        added.source = args.x + row_number * args.x_batch + channel + offset_of(mover, cut, args.x_time, 0);
        added.omega = args.omega + channel + (mover.limit > 0 ? mover.channel : 0);
        added.step = mover.begin;
        added.length = length;
    }
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (start + i < end) load_block(shared + i * BLOCK_BYTES, source, hop, moved, loaded, length);
        source += SPAN * hop;
        loaded += SPAN;
        if (adds && start + i > AFTER && start + i <= end) load_added(added_blocks + i * BLOCK_BYTES, added, moved);
        commit_group();
    }
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int mine = place(2 * q, g, warp);
    char* offsets = shared + STAGES * BLOCK_BYTES + warp * PART * 4;
    if (loaded_group != group) read_kernels(toeplitz, offsets, weight, bias, channel + warp * PART, args.channels);
    loaded_group = group;
    const Dropout dropout = dropout_of(args.seed, layer, row_number, args.channels, args.dropped, args.scale);
    Draws draws = draws_for(cut, dropout, tile_in_row, channel + warp * PART);
    word inputs[BLOCKS][PART][2];
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
        for (int c = 0; c < PART; ++c) inputs[i][c][0] = inputs[i][c][1] = 0;

    int stage = 0;
#pragma unroll 1
    for (int s = start; s < end; ++s) {
        wait_group<STAGES - 2>();
        __syncthreads();
        // The output of the last step is where the next input will be; a thread stores the bytes that it refills.
        char* last = shared + (stage == 0 ? STAGES - 1 : stage - 1) * BLOCK_BYTES;
        const int base_now = opaque(moved);
        char* added_block = added_blocks + added_slot * BLOCK_BYTES;
        added_slot = added_slot == ADDED - 1 ? 0 : added_slot + 1;
        if (s > AFTER) {
            if (adds) add_input(last, added_block, added.omega, base_now);
            store_block(last, target, y_hop, base_now, written, mover.limit, mover.limit);
            target += SPAN * y_hop;
            written += SPAN;
        }
        if (s + STAGES - 1 < end) {
            load_block(last, source, hop, base_now, loaded, length);
            source += SPAN * hop;
            loaded += SPAN;
        }
        if (adds && s + STAGES - 1 > AFTER && s + STAGES - 1 <= end) load_added(added_block, added, base_now);
        commit_group();
        char* block = shared + stage * BLOCK_BYTES;
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        shift_matrices(inputs);
        read_block(inputs[0], block, mine);
        if (s < AFTER) continue;
        Bytes16 out[2][2];
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
                const float offset = Z_SCALE * read_bias(offsets, own);
                float z[4] = {offset, offset, offset, offset};
                convolve(z, inputs, inputs[0], toeplitz, own);
                const int center = (BLOCKS - AFTER) % BLOCKS;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const word pair = inputs[center][own][i / 2];
                    const float skip = RESIDUAL ? (i % 2 ? second(pair) : first(pair)) : 0.0f;
                    y_pair[c][i] = activate_scaled(z[i], DROPOUT ? dropout.scale : 1.0f) + skip;
                    if (DROPOUT && !is_kept(dropout, drawn[i], own)) y_pair[c][i] = skip;
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
                store16(block + place_offset(mine, odd, h), out[odd][h]);
#pragma unroll
        for (int h = 0; h < 2; ++h) draws.index[h] += SPAN * draws.hop;
    }
    if (adds) wait_group<0>();
    __syncthreads();
    char* last = shared + (stage == 0 ? STAGES - 1 : stage - 1) * BLOCK_BYTES;
    if (adds) add_input(last, added_blocks + added_slot * BLOCK_BYTES, added.omega, moved);
    store_block(last, target, y_hop, moved, written, mover.limit, mover.limit);
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) tensor_core_forward(const Args args) {
    extern __shared__ __align__(128) char shared[];
    const number* x = args.x;
    long long x_time = args.x_time, x_batch = args.x_batch, dilation = args.dilation;
    const int groups = static_cast<int>((args.channels + PART * PARTS - 1) / (PART * PARTS));
    const long long tensor = args.rows * args.time * args.channels;
    const int warp = threadIdx.x / 32;
    char* offsets = shared + STAGES * BLOCK_BYTES + warp * PART * 4;
    word toeplitz[BLOCKS][PART];
    int loaded_group = -1;  // the group of channels whose kernels are in registers
    for (int layer = 0; layer < args.depth; ++layer) {
        const int later = static_cast<int>(args.depth) - 1 - layer;
        // If nothing is kept for the backward pass, one tensor alternates with the output.
        const bool to_y = later == 0 || (!args.keep && later % 2 == 0);
        number* y = to_y ? args.y : args.inner + (args.keep ? layer : 0) * tensor;
        const Cut cut = cut_time(args.time, dilation, args.steps[layer]);
        const float* weight = args.weight + layer * args.channels * K;
        const float* bias = args.bias + layer * args.channels;
        const int tiles_in_row = static_cast<int>(cut.tiles_in_row);
        const int tiles_in_group = tiles_in_row * static_cast<int>(args.rows);
        for (int tile = blockIdx.x; tile < tiles_in_group * groups; tile += gridDim.x) {
            const int group = tile / tiles_in_group, in_group = tile % tiles_in_group;
            forward_tile(shared, cut, in_group % tiles_in_row, in_group / tiles_in_row, group, args, x, x_time, x_batch,
                         weight, bias, y, layer, toeplitz, loaded_group);
        }
        x = y;
        x_time = args.channels;
        x_batch = args.time * args.channels;
        dilation = min(dilation * args.factor, args.time);
        if (later == 0) break;
        // Read the kernels of the next layer's first tile while other blocks finish this layer.
        const Cut next = cut_time(args.time, dilation, args.steps[layer + 1]);
        loaded_group = static_cast<int>(blockIdx.x / (next.tiles_in_row * static_cast<word>(args.rows)));
        if (loaded_group < groups)
            read_kernels(toeplitz, offsets, weight + args.channels * K, bias + args.channels,
                         (static_cast<long long>(loaded_group) * WARPS + warp) * PART, args.channels);
        grid_sync(args.counter, static_cast<word>(layer + 1) * gridDim.x);
    }
    if (args.depth > 1) reset_counter(args.counter);
}
