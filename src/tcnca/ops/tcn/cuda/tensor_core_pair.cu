// Two blocks y = x + activation(convolution(x)) of dilations d and d · f in one pass over memory.
//
// A tile is `rows` steps of one chain t = phase + d · n, in which the dilations are 1 and f, of 8 · PARTS channels: a
// whole chain, or a segment of it with the steps before and behind it on which its outputs depend. It stays in shared
// memory, where both blocks compute in place, except that a second block that looks ahead writes to other rows. A warp
// owns 8 channels, and needs no other warp but to load and store.

struct Args {
    const number* x;
    const float* weight;
    const float* bias;
    number* y;
    number* inner;  // for the output of the first block, or null
    const long long* lengths;
    const long long* seed;
    const number* input;
    const float* omega;
    long long time, channels, x_time, x_batch, input_time, input_batch;
    long long dilation, factor, rows, before, own, segments, steps, items, tiles, layer, dropped;
    double scale;
};

static_assert(AFTER <= 1, "one block of steps behind a segment is kept in registers");

// Before the rows, shared memory has the pairs of neighboring taps of both kernels of each warp's channels, from which
// the Toeplitz matrices are read, and zeros.
#define TAPS (SPAN * BLOCKS + 6)
#define PAIR_BYTES (4 * PART)
#define TABLE_BYTES (TAPS * PAIR_BYTES)
#define ZEROS_AT (WARPS * 2 * TABLE_BYTES)
#define ROWS_AT (ZEROS_AT + 128)

// Offset of the 16 bytes of a part of a row. Two rows are 128 bytes; they are swizzled so that the rows of neighboring
// steps of both dilations are in different banks.
__device__ __forceinline__ int row_place(int row, int part) {
    const int line = row >> 1;
    return line * 128 + (((row & 1) << 2 | part) ^ ((line ^ line >> 3) & 7)) * 16;
}

struct Tile {
    char* rows;
    int count;         // of rows
    int begin, end;    // the rows of the tile's own steps
    int first;         // the step of row 0
    int chain, length;  // steps in the chain, and those that are not padding
    int phase;
    long long row, channel;
};

// Where a block writes its outputs: row r of the tile to row r - `first`, if it is one of `count`.
struct Target {
    char* rows;
    int first, count;
};

// Read a lane's part of a matrix whose step 2q is in `row` and step 2q + 1 in `row + hop`; zeros for rows that the tile
// does not have, where CHECKED.
template <bool CHECKED>
__device__ __forceinline__ void read_rows(word (&matrix)[PART][2], int h, const Tile& tile, int row, int hop) {
    int at[2];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
        const int own = row + odd * hop;
        at[odd] = row_place(own, threadIdx.x / 32);
        if (CHECKED && static_cast<word>(own) >= static_cast<word>(tile.count)) at[odd] = ZEROS_AT - ROWS_AT;
    }
    const Bytes16 even = load16(tile.rows + at[0]), odd = load16(tile.rows + at[1]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        matrix[2 * j][h] = low_halves(even.part[j], odd.part[j]);
        matrix[2 * j + 1][h] = high_halves(even.part[j], odd.part[j]);
    }
}

// What a warp knows about a block: its Toeplitz matrices, biases and dropout.
struct Kernels {
    word toeplitz[BLOCKS][PART];
    float bias[PART];
    Dropout dropout;
};

__device__ __forceinline__ float tap_at(const float* kernel, int j) { return j >= 0 && j < K ? kernel[j] : 0.0f; }

// Write the pairs of taps of both blocks, each tap with the one before it.
__device__ __forceinline__ void write_tables(char* table, const Args& args, long long channel) {
    for (int t = threadIdx.x % 32; t < 2 * TAPS; t += 32) {
        const int block = t / TAPS, j = AHEAD - SPAN * AFTER - 6 + t % TAPS;
        Bytes16 pairs[2];
#pragma unroll
        for (int c = 0; c < PART; ++c) {
            const bool real = channel + c < args.channels;
            const float* kernel = args.weight + (block * args.channels + (real ? channel + c : 0)) * K;
            const word pair = pack(Z_SCALE * tap_at(kernel, j), Z_SCALE * tap_at(kernel, j - 1));
            pairs[c / 4].part[c % 4] = real ? pair : 0;
        }
        store16(table + t * PAIR_BYTES, pairs[0]);
        store16(table + t * PAIR_BYTES + 16, pairs[1]);
    }
}

__device__ __forceinline__ void read_kernels(Kernels& kernels, const char* table, const Args& args, const Tile& tile,
                                             int block) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const char* from = table + (block * TAPS + SPAN * i + g - 2 * q + 6) * PAIR_BYTES + half * 16;
            const Bytes16 v = load16(from);
#pragma unroll
            for (int c = 0; c < 4; ++c) kernels.toeplitz[i][half * 4 + c] = v.part[c];
        }
#pragma unroll
    for (int c = 0; c < PART; ++c) {
        const long long channel = tile.channel + threadIdx.x / 32 * PART + c;
        const bool real = BIAS && channel < args.channels;
        kernels.bias[c] = real ? Z_SCALE * args.bias[block * args.channels + channel] : 0.0f;
    }
    kernels.dropout =
        dropout_of(args.seed, args.layer + block, tile.row, args.channels, args.dropped, args.scale);
}

// Compute the outputs of a matrix of steps: those of step 2q + odd and half h of the chains belong to row
// rows[h] + odd · hop. Those of the FIRST block are zeros for steps that do not count, and all rows exist.
template <bool FIRST>
__device__ __forceinline__ void compute(const word (&inputs)[BLOCKS][PART][2], const Kernels& kernels,
                                        const Tile& tile, const Args& args, const Target& target,
                                        const int (&rows)[2], int hop) {
    const Dropout& dropout = kernels.dropout;
    const long long channel = tile.channel + threadIdx.x / 32 * PART;
    Bytes16 out[2][2];
    word index[4];
#pragma unroll
    for (int i = 0; DROPOUT && i < 4; ++i) {
        const word step = static_cast<word>(tile.first + rows[i / 2] + i % 2 * hop);
        const word time = static_cast<word>(tile.phase) + step * static_cast<word>(args.dilation);
        index[i] = time * dropout.fours + static_cast<word>(channel / 4);
    }
    Draw drawn[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        float y_pair[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (DROPOUT && j % 2 == 0) drawn[i] = draw(dropout, index[i] + j / 2);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int own = 2 * j + c;
            const float offset = kernels.bias[own];
            float z[4] = {offset, offset, offset, offset};
            convolve(z, inputs, inputs[0], kernels.toeplitz, own);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const word pair = inputs[(BLOCKS - AFTER) % BLOCKS][own][i / 2];
                const float skip = RESIDUAL ? (i % 2 ? second(pair) : first(pair)) : 0.0f;
                const float y = activate_scaled(z[i], DROPOUT ? dropout.scale : 1.0f);
                y_pair[c][i] = RESIDUAL ? y + skip : y;
                if (DROPOUT && !is_kept(dropout, drawn[i], own)) y_pair[c][i] = skip;
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i % 2][i / 2].part[j] = pack(y_pair[0][i], y_pair[1][i]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int row = rows[h] + odd * hop;
            const bool counts = static_cast<word>(tile.first + row) < static_cast<word>(tile.length);
#pragma unroll
            for (int j = 0; FIRST && j < 4; ++j) out[odd][h].part[j] = counts ? out[odd][h].part[j] : 0;
            if (FIRST || static_cast<word>(row - target.first) < static_cast<word>(target.count))
                store16(target.rows + row_place(row - target.first, threadIdx.x / 32), out[odd][h]);
        }
}

// Compute a block, 16 segments of chains at a time, along which the inputs stay in registers. In the FIRST block the
// rows are one chain of 16 segments. In the second one there are `factor` chains of `steps` in a segment.
//
// Outputs may replace inputs: the inputs around the segments are read before, and the latest segments come first.
template <bool FIRST>
__device__ __forceinline__ void run_block(const Tile& tile, const Args& args, const Kernels& kernels,
                                          const Target& target) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int hop = FIRST ? 1 : static_cast<int>(args.factor), begin = FIRST ? 0 : tile.begin;
    const int steps = FIRST ? tile.count / CHAINS : static_cast<int>(args.steps);
    const int items = FIRST ? CHAINS : static_cast<int>(args.items);
#pragma unroll 1
    for (int item = (items - 1) / CHAINS * CHAINS; item >= 0; item -= CHAINS) {
        int rows[2];
        word inputs[BLOCKS][PART][2], behind[PART][2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int own = item + g + 8 * h, segment = FIRST ? own : own / hop;
            rows[h] = begin + (FIRST ? 0 : own - segment * hop) + (segment * steps + 2 * q) * hop;
            if (own >= items) rows[h] = tile.count;  // nothing to read or to write from here on
            // The shift below makes these the older inputs.
#pragma unroll
            for (int i = 1; i < BLOCKS; ++i)
                read_rows<true>(inputs[(BLOCKS - i + 1) % BLOCKS], h, tile, rows[h] + SPAN * (AFTER - i) * hop, hop);
            if (FIRST && AFTER) read_rows<true>(behind, h, tile, rows[h] + steps, 1);
        }
        __syncwarp();  // the rows around a segment belong to other lanes, which may replace them
#pragma unroll 1
        for (int s = 0; s < steps; s += SPAN) {
            shift_matrices(inputs);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (!FIRST || !AFTER || s + SPAN < steps) {
                    read_rows<!FIRST>(inputs[0], h, tile, rows[h] + SPAN * AFTER * hop, hop);
                } else {
#pragma unroll
                    for (int c = 0; c < PART; ++c) inputs[0][c][h] = behind[c][h];
                }
            }
            compute<FIRST>(inputs, kernels, tile, args, target, rows, hop);
            rows[0] += SPAN * hop;
            rows[1] += SPAN * hop;
        }
        __syncwarp();
    }
}

// Store the tile's own steps, with `omega` added to omega times the input.
__device__ __forceinline__ void store_tile(const Tile& tile, const Args& args, const Target& from, number* to,
                                           const float* omega) {
    const int part = threadIdx.x % PARTS;
    const long long channel = tile.channel + part * PART;
    if (channel >= args.channels) return;
    float scale[PART];
#pragma unroll
    for (int c = 0; c < PART; ++c) scale[c] = OMEGA && omega != nullptr ? omega[channel + c] : 0.0f;
#pragma unroll 4
    for (int row = tile.begin + threadIdx.x / PARTS; row < tile.end; row += THREADS / PARTS) {
        const int step = tile.first + row;
        if (step >= tile.chain) break;
        const long long time = tile.phase + step * args.dilation;
        Bytes16 v = load16(from.rows + row_place(row - from.first, part));
        if (OMEGA && omega != nullptr && step < tile.length) {
            const number* input = args.input + tile.row * args.input_batch + time * args.input_time + channel;
            const Bytes16 x = load16(reinterpret_cast<const char*>(input));
#pragma unroll
            for (int j = 0; j < 4; ++j)
                v.part[j] = pack(fmaf(scale[2 * j], first(x.part[j]), first(v.part[j])),
                                 fmaf(scale[2 * j + 1], second(x.part[j]), second(v.part[j])));
        }
        store_global(to + (tile.row * args.time + time) * args.channels + channel, v);
    }
}

__device__ __forceinline__ Tile tile_of(char* shared, const Args& args, word index, word groups) {
    const word segments = static_cast<word>(args.segments), phases = static_cast<word>(args.dilation);
    // The other channels of the same rows come next, then the next segment, then the next phase.
    const word group = index % groups, chain = index / groups, segment = chain % segments, phase = chain / segments;
    Tile tile;
    tile.rows = shared + ROWS_AT;
    tile.count = static_cast<int>(args.rows);
    tile.begin = static_cast<int>(args.before);
    tile.end = static_cast<int>(args.before + args.own);
    tile.first = static_cast<int>(segment * args.own) - tile.begin;
    tile.phase = static_cast<int>(phase % phases);
    tile.row = phase / phases;
    tile.channel = static_cast<long long>(group) * PART * PARTS;
    tile.chain = steps_before(args.time, tile.phase, phases);
    tile.length = LENGTHS ? steps_before(args.lengths[tile.row], tile.phase, phases) : tile.chain;
    return tile;
}

__device__ __forceinline__ void load_tile(const Tile& tile, const Args& args) {
    const int part = threadIdx.x % PARTS;
    const bool real = tile.channel + part * PART < args.channels;
    const number* source = args.x + tile.row * args.x_batch + tile.phase * args.x_time + tile.channel + part * PART;
    for (int row = threadIdx.x / PARTS; row < tile.count; row += THREADS / PARTS) {
        const int step = tile.first + row;
        const bool valid = real && static_cast<word>(step) < static_cast<word>(tile.length);
        copy_async(tile.rows + row_place(row, part), source + step * args.dilation * args.x_time, valid);
    }
    commit_group();
}

// A block of threads computes `tiles` of the grid's tiles, all of the same channels.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) tensor_core_pair(const Args args) {
    extern __shared__ __align__(128) char shared[];
    const word groups = static_cast<word>((args.channels + PART * PARTS - 1) / (PART * PARTS));
    char* table = shared + threadIdx.x / 32 * 2 * TABLE_BYTES;
    for (word index = blockIdx.x; index < args.tiles; index += gridDim.x) {
        const Tile tile = tile_of(shared, args, index, groups);
        load_tile(tile, args);
        if (index == blockIdx.x) {
            write_tables(table, args, tile.channel + threadIdx.x / 32 * PART);
            if (threadIdx.x == 0) store16(shared + ZEROS_AT, {0, 0, 0, 0});
        }
        wait_group<0>();
        __syncthreads();
        Kernels kernels;
        read_kernels(kernels, table, args, tile, 0);
        const Target in_place = {tile.rows, 0, tile.count};
        run_block<true>(tile, args, kernels, in_place);
        __syncthreads();
        if (args.inner != nullptr) {
            store_tile(tile, args, in_place, args.inner, nullptr);
            __syncthreads();
        }
        read_kernels(kernels, table, args, tile, 1);
        const Target other = {tile.rows + tile.count * ROW_BYTES, tile.begin, tile.end - tile.begin};
        const Target target = AHEAD ? other : in_place;
        run_block<false>(tile, args, kernels, target);
        __syncthreads();
        store_tile(tile, args, target, args.y, args.omega);
        __syncthreads();
    }
}
