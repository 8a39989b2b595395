// Gradients of `depth` blocks y = x + activation(convolution(x)) with long kernels on the tensor cores, in one launch.
//
// The matrices of a long kernel do not fit into registers, nor its Toeplitz matrices into shared memory. So a warp has
// only OWN = 4 channels, half of a row's part, and
// - the last BLOCKS - 1 matrices of x and dz are in shared memory, as they are used: a lane reads what it has written;
// - of the Toeplitz matrices the pairs of neighboring taps are in shared memory, from which all of them are read;
// - dy is loaded a second time when its block's dx is computed, instead of being kept until then.
// The rest is as in tensor_core_backward_short.cu. The dx is written where the newest dy was.

#define OWN 4
#define NATURAL (DEEP + 1)  // blocks of x, dy, and the skip connections' dy as they are loaded
#define MATRICES (BLOCKS - 1)
#define X_AT 0
#define DY_AT (NATURAL * BLOCK_BYTES)
#define SKIP_AT (2 * NATURAL * BLOCK_BYTES)
#define OUTPUT_AT ((2 + RELOAD) * NATURAL * BLOCK_BYTES)
#define X_MATRICES_AT ((2 + RELOAD + OMEGA) * NATURAL * BLOCK_BYTES)
#define DZ_MATRICES_AT (X_MATRICES_AT + MATRICES * BLOCK_BYTES)
#define TABLES_AT (DZ_MATRICES_AT + MATRICES * BLOCK_BYTES)
#define TAPS (SPAN * BLOCKS + 6)  // pairs of neighboring taps in all Toeplitz matrices
#define PAIR_BYTES (4 * OWN)
#define TABLE_BYTES (2 * TAPS * PAIR_BYTES > PAIRS * 512 ? 2 * TAPS * PAIR_BYTES : PAIRS * 512)
#define OFFSETS_AT (TABLES_AT + WARPS * TABLE_BYTES)
#define OMEGA_AT (OFFSETS_AT + WARPS * OWN * 4)
#define LAYER_AT (OMEGA_AT + OMEGA * WARPS * OWN * 4)

static_assert(MATRICES >= 1, "a kernel of one tap has no matrices to keep");

// Sum the matrices of products (step of x, step of dz) along their diagonals: one number per tap, and one for the bias.
__device__ __forceinline__ void write_partial(char* scratch, const float (&products)[PAIRS][OWN][4], float* partial,
                                              long long channel, long long channels) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    float* square = reinterpret_cast<float*>(scratch);
#pragma unroll
    for (int c = 0; c < OWN; ++c) {
#pragma unroll
        for (int p = 0; p < PAIRS; ++p)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                *reinterpret_cast<float2*>(square + ((2 * p + h) * SPAN + g) * SPAN + 2 * q) =
                    make_float2(products[p][c][2 * h], products[p][c][2 * h + 1]);
        __syncwarp();
        if (channel + c < channels) {
            for (int tap = lane; tap < K + BIAS; tap += 32) {
                float sum = 0.0f;
#pragma unroll
                for (int n = 0; n < SPAN; ++n) {
                    const int x = n - tap + AHEAD;  // the step of x that the tap connects to step n
                    sum += square[(BIAS && tap == K ? BLOCKS * SPAN : (AFTER - (x >> 3)) * SPAN + (x & 7)) * SPAN + n];
                }
                partial[(channel + c) * COLUMNS + tap] = sum;
            }
        }
        __syncwarp();
    }
}

// Read a lane's part of a block as it was loaded: of each channel the times 2q and 2q + 1 of chains g and g + 8.
__device__ __forceinline__ void read_natural(word (&matrix)[OWN][2], const char* block) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const uint2 even = *reinterpret_cast<const uint2*>(block + 8 * h * ROW_BYTES);
        const uint2 odd = *reinterpret_cast<const uint2*>(block + (CHAINS + 8 * h) * ROW_BYTES);
        matrix[0][h] = low_halves(even.x, odd.x);
        matrix[1][h] = high_halves(even.x, odd.x);
        matrix[2][h] = low_halves(even.y, odd.y);
        matrix[3][h] = high_halves(even.y, odd.y);
    }
}

// Sum the lanes' sums for the gradient of omega.
__device__ __forceinline__ void write_domega(const float (&domega)[OWN], float* partial, long long channel,
                                             long long channels) {
#pragma unroll
    for (int c = 0; c < OWN; ++c) {
        float sum = domega[c];
#pragma unroll
        for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (threadIdx.x % 32 == 0 && channel + c < channels) partial[(channel + c) * COLUMNS + K + BIAS] = sum;
    }
}

// Add the products of an input and the output's gradient to the lane's sums for the gradient of omega.
__device__ __forceinline__ void add_domega(float (&domega)[OWN], const word (&x)[OWN][2], const char* output_dy) {
    word dy[OWN][2];
    read_natural(dy, output_dy);
#pragma unroll
    for (int c = 0; c < OWN; ++c)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            domega[c] = fmaf(first(x[c][h]), first(dy[c][h]), domega[c]);
            domega[c] = fmaf(second(x[c][h]), second(dy[c][h]), domega[c]);
        }
}

__device__ __forceinline__ float tap_at(const float* kernel, int j) { return j >= 0 && j < K ? kernel[j] : 0.0f; }

// Write pairs of neighboring taps: for the pre-activation, each tap with the one before it, then for dx, each tap with
// the one after it.
__device__ __forceinline__ void write_tables(char* table, const float* weight, long long channel, long long channels) {
    for (int t = threadIdx.x % 32; t < TAPS; t += 32) {
        const int j = AHEAD - SPAN * AFTER - 6 + t;
        Bytes16 forward, back;
#pragma unroll
        for (int c = 0; c < OWN; ++c) {
            const bool real = channel + c < channels;
            const float* kernel = weight + (real ? channel + c : 0) * K;
            forward.part[c] = real ? pack(Z_SCALE * tap_at(kernel, j), Z_SCALE * tap_at(kernel, j - 1)) : 0;
            back.part[c] = real ? pack(tap_at(kernel, j - 1), tap_at(kernel, j)) : 0;
        }
        store16(table + t * PAIR_BYTES, forward);
        store16(table + (TAPS + t) * PAIR_BYTES, back);
    }
    __syncwarp();
}

// Where a lane's words of Toeplitz matrix 0 are; those of the next one are SPAN pairs further, or before it for dx.
__device__ __forceinline__ int forward_pair() { return (threadIdx.x % 32 / 4 - 2 * (threadIdx.x % 4) + 6) * PAIR_BYTES; }
__device__ __forceinline__ int backward_pair() {
    return (TAPS + SPAN * (BLOCKS - 1) + 2 * (threadIdx.x % 4) - threadIdx.x % 32 / 4 + 7) * PAIR_BYTES;
}

// sum += a · (matrix i of the table) + b · (matrix i + 1).
template <bool BACK>
__device__ __forceinline__ void convolve_two(float (&sum)[OWN][4], const word (&a)[OWN][2], const word (&b)[OWN][2],
                                             const char* table, int i) {
    const Bytes16 low = load16(table + (BACK ? -i : i) * SPAN * PAIR_BYTES);
    const Bytes16 high = load16(table + (BACK ? -i - 1 : i + 1) * SPAN * PAIR_BYTES);
#pragma unroll
    for (int c = 0; c < OWN; ++c)
        multiply16(sum[c], a[c][0], a[c][1], b[c][0], b[c][1], low.part[c], high.part[c]);
}

template <bool BACK>
__device__ __forceinline__ void convolve_one(float (&sum)[OWN][4], const word (&a)[OWN][2], const char* table, int i) {
    const Bytes16 v = load16(table + (BACK ? -i : i) * SPAN * PAIR_BYTES);
#pragma unroll
    for (int c = 0; c < OWN; ++c) multiply8(sum[c], a[c][0], a[c][1], v.part[c]);
}

// The lane's words of a matrix in shared memory.
__device__ __forceinline__ void read_matrix(word (&matrix)[OWN][2], const char* from) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const Bytes16 v = load16(from + h * 512);
#pragma unroll
        for (int c = 0; c < OWN; ++c) matrix[c][h] = v.part[c];
    }
}

__device__ __forceinline__ void write_matrix(char* to, const word (&matrix)[OWN][2]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) store16(to + h * 512, {matrix[0][h], matrix[1][h], matrix[2][h], matrix[3][h]});
}

__device__ __forceinline__ int earlier(int slot) { return slot == 0 ? MATRICES - 1 : slot - 1; }

// Compute dz of a block of steps from its dy.
__device__ __forceinline__ void compute_dz(word (&dz)[OWN][2], const word (&inputs)[BLOCKS][OWN][2],
                                           const word (&dy)[OWN][2], const char* table, const char* offsets,
                                           const Dropout& dropout, const Draws& draws) {
    const float scale = DROPOUT ? dropout.scale : 1.0f;
    float z[OWN][4];
#pragma unroll
    for (int c = 0; c < OWN; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) z[c][i] = Z_SCALE * read_bias(offsets, c);
#pragma unroll
    for (int i = 0; i + 1 < BLOCKS; i += 2) convolve_two<false>(z, inputs[i], inputs[i + 1], table, i);
    if (BLOCKS % 2) convolve_one<false>(z, inputs[BLOCKS - 1], table, BLOCKS - 1);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        Draw drawn[2];
#pragma unroll
        for (int odd = 0; DROPOUT && odd < 2; ++odd) drawn[odd] = draw(dropout, draws.index[h] + odd * draws.hop);
#pragma unroll
        for (int c = 0; c < OWN; ++c) {
            float values[2] = {first(dy[c][h]) * activation_grad_scaled(z[c][2 * h], scale),
                               second(dy[c][h]) * activation_grad_scaled(z[c][2 * h + 1], scale)};
#pragma unroll
            for (int odd = 0; DROPOUT && odd < 2; ++odd)
                if (!is_kept(dropout, drawn[odd], c)) values[odd] = 0.0f;
            dz[c][h] = pack(values[0], values[1]);
        }
    }
}

// Add the products of inputs and dz of a block of steps, from which the kernels' gradients are summed.
__device__ __forceinline__ void add_products(float (&products)[PAIRS][OWN][4], const word (&inputs)[BLOCKS][OWN][2],
                                             const word (&dz)[OWN][2]) {
    const word one = pack(1.0f, 1.0f);
#pragma unroll
    for (int c = 0; c < OWN; ++c) {
        const word b0 = transpose(dz[c][0]), b1 = transpose(dz[c][1]);
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            word a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int block = 2 * p + i % 2;
                a[i] = block < BLOCKS ? transpose(inputs[block % BLOCKS][c][i / 2])
                                      : (BIAS && block == BLOCKS ? one : 0);
            }
            multiply16(products[p][c], a[0], a[1], a[2], a[3], b0, b1);
        }
    }
}

// Compute the dx of a block and write it to `out`. `slot` is where the newest matrix of dz belongs. `output_dy` is null
// except in the bottom layer.
__device__ __forceinline__ void compute_dx(char* out, const char* skip, const char* output_dy, const float* omega,
                                           const word (&newest)[OWN][2], const char* matrices, int slot,
                                           const char* table) {
    float dx[OWN][4];
#pragma unroll
    for (int c = 0; c < OWN; ++c)
#pragma unroll
        for (int i = 0; i < 4; ++i) dx[c][i] = 0.0f;
    if (RELOAD) {
        word dy[OWN][2];
        read_natural(dy, skip);
#pragma unroll
        for (int c = 0; c < OWN; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i) dx[c][i] = i % 2 ? second(dy[c][i / 2]) : first(dy[c][i / 2]);
    }
    if (OMEGA && output_dy != nullptr) {
        word dy[OWN][2];
        read_natural(dy, output_dy);
#pragma unroll
        for (int c = 0; c < OWN; ++c)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                dx[c][i] = fmaf(omega[c], i % 2 ? second(dy[c][i / 2]) : first(dy[c][i / 2]), dx[c][i]);
    }
    word a[OWN][2], b[OWN][2];
#pragma unroll
    for (int i = 0; i < BLOCKS; i += 2) {
        if (i == 0) {
#pragma unroll
            for (int c = 0; c < OWN; ++c)
#pragma unroll
                for (int h = 0; h < 2; ++h) a[c][h] = newest[c][h];
        } else {
            slot = earlier(slot);
            read_matrix(a, matrices + slot * BLOCK_BYTES);
        }
        if (i + 1 < BLOCKS) {
            slot = earlier(slot);
            read_matrix(b, matrices + slot * BLOCK_BYTES);
            convolve_two<true>(dx, a, b, table, i);
        } else {
            convolve_one<true>(dx, a, table, i);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            const int i = 2 * h + odd;
            *reinterpret_cast<uint2*>(out + (odd * CHAINS + 8 * h) * ROW_BYTES) =
                make_uint2(pack(dx[0][i], dx[1][i]), pack(dx[2][i], dx[3][i]));
        }
}

// Positions in the rings, which continue from tile to tile.
struct Slots {
    int natural, matrix;
};

__device__ __forceinline__ void backward_tile(char* shared, const Tile& tile, const Args& args, const Layer& layer,
                                              Prefetcher& prefetcher, Slots& slots,
                                              float (&products)[PAIRS][OWN][4], float (&domega)[OWN]) {
    const long long channel = static_cast<long long>(tile.group) * PART * PARTS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const int mine = place(2 * q, g, warp / 2) + warp % 2 * 8, moved = base_of_mover();
    char* x_matrices = shared + X_MATRICES_AT + (warp * 64 + lane) * 16;
    char* dz_matrices = x_matrices + MATRICES * BLOCK_BYTES;
    const char* table = shared + TABLES_AT + warp * TABLE_BYTES;
    const char* offsets = shared + OFFSETS_AT + warp * OWN * 4;
    number* target =
        layer.dx + tile.row * args.time * args.channels + channel + offset_of(tile.mover, layer.cut, args.channels, 0);
    int written = tile.mover.begin;
    const Dropout dropout = dropout_of(args.seed, layer.index, tile.row, args.channels, args.dropped, args.scale);
    Draws draws = draws_for(layer.cut, dropout, tile.in_row, channel + warp * OWN);
#pragma unroll
    for (int h = 0; h < 2; ++h) draws.index[h] += (tile.start - AFTER) * SPAN * draws.hop;
    if (tile.start == 0) {
        // There is nothing before the start of the sequence; other tiles read what is before them.
        for (int slot = 0; slot < MATRICES; ++slot) write_matrix(x_matrices + slot * BLOCK_BYTES, {});
    }
#pragma unroll 1
    for (int s = tile.start; s < tile.end; ++s) {
        const int o = s - AFTER, e = o - BEFORE;
        wait_group<DEEP - 1>();
        __syncthreads();
        char* now = shared + slots.natural * BLOCK_BYTES;
        // The blocks of the last step are free, once its dx, which is where its dy was, is stored.
        char* last = shared + later(slots.natural, DEEP, NATURAL) * BLOCK_BYTES;
        const int base_now = opaque(moved);
        if (e > 0) {
            store_block(last + DY_AT, target, layer.dx_hop, base_now, written, tile.mover.limit, tile.length);
            target += SPAN * layer.dx_hop;
            written += SPAN;
        }
        prefetch_next(prefetcher, last, last + DY_AT, last + SKIP_AT, last + OUTPUT_AT, base_now, layer, args);
        word dz[OWN][2];
#pragma unroll
        for (int c = 0; c < OWN; ++c) dz[c][0] = dz[c][1] = 0;
        const bool adds = OMEGA && layer.index == 0 && e >= 0;
        if (adds) {
            // The oldest input, which the newest one will replace, is that of the block whose dx is computed.
            word x[OWN][2];
            read_matrix(x, x_matrices + slots.matrix * BLOCK_BYTES);
            add_domega(domega, x, now + OUTPUT_AT + mine);
        }
        if (o < tile.dz_end) {
            word inputs[BLOCKS][OWN][2];
            read_natural(inputs[0], now + mine);
            if (s >= 0) {
                int slot = slots.matrix;
#pragma unroll
                for (int i = 1; i < BLOCKS; ++i) {
                    slot = earlier(slot);
                    read_matrix(inputs[i], x_matrices + slot * BLOCK_BYTES);
                }
                word dy[OWN][2];
                read_natural(dy, now + DY_AT + mine);
                compute_dz(dz, inputs, dy, table + forward_pair(), offsets, dropout, draws);
                if (o >= 0 && o < tile.blocks) add_products(products, inputs, dz);
            }
            write_matrix(x_matrices + slots.matrix * BLOCK_BYTES, inputs[0]);
        }
        if (e >= 0)
            compute_dx(now + DY_AT + mine, now + SKIP_AT + mine, adds ? now + OUTPUT_AT + mine : nullptr,
                       reinterpret_cast<const float*>(shared + OMEGA_AT) + warp * OWN, dz, dz_matrices, slots.matrix,
                       table + backward_pair());
        write_matrix(dz_matrices + slots.matrix * BLOCK_BYTES, dz);
        slots.natural = later(slots.natural, 1, NATURAL);
        slots.matrix = later(slots.matrix, 1, MATRICES);
#pragma unroll
        for (int h = 0; h < 2; ++h) draws.index[h] += SPAN * draws.hop;
    }
    if (tile.start < tile.end) {
        __syncthreads();
        store_block(shared + DY_AT + later(slots.natural, DEEP, NATURAL) * BLOCK_BYTES, target, layer.dx_hop, moved,
                    written, tile.mover.limit, tile.length);
    }
}

// Read the kernels of the warp's channels to shared memory.
__device__ __forceinline__ void read_kernels(char* shared, const Layer& layer, const Args& args, int group) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long channel = static_cast<long long>(group) * PART * PARTS + warp * OWN;
    write_tables(shared + TABLES_AT + warp * TABLE_BYTES, layer.weight, channel, args.channels);
    if (BIAS && lane < OWN)
        reinterpret_cast<float*>(shared + OFFSETS_AT)[warp * OWN + lane] =
            channel + lane < args.channels ? layer.bias[channel + lane] : 0.0f;
    if (OMEGA && lane < OWN)
        reinterpret_cast<float*>(shared + OMEGA_AT)[warp * OWN + lane] =
            channel + lane < args.channels ? args.omega[channel + lane] : 0.0f;
    __syncwarp();
}

// Process all tiles of a layer that belong to this block.
__device__ __forceinline__ void backward_layer(char* shared, const Args& args, const Layer& layer) {
    const int warp = threadIdx.x / 32;
    int index = blockIdx.x;
    // Read the first tile's kernels while other blocks finish the layer above.
    if (index < layer.tiles) read_kernels(shared, layer, args, index / layer.tiles_in_group);
    const word above = static_cast<word>(args.depth) - 1 - layer.index;
    if (above > 0) grid_sync(args.counter, above * gridDim.x);
    Prefetcher prefetcher = prefetcher_for(index);
#pragma unroll 1
    for (int i = 0; i < DEEP; ++i) {
        char* to = shared + i * BLOCK_BYTES;
        prefetch_next(prefetcher, to, to + DY_AT, to + SKIP_AT, to + OUTPUT_AT, base_of_mover(), layer, args);
    }
    Slots slots = {0, 0};
    while (index < layer.tiles) {
        const int group = index / layer.tiles_in_group, part = index - group * layer.tiles_in_group;
        float products[PAIRS][OWN][4], domega[OWN] = {};
#pragma unroll
        for (int c = 0; c < OWN; ++c)
#pragma unroll
            for (int p = 0; p < PAIRS; ++p)
#pragma unroll
                for (int i = 0; i < 4; ++i) products[p][c][i] = 0.0f;
#pragma unroll 1
        for (; index < (group + 1) * layer.tiles_in_group; index += gridDim.x) {
            const Tile tile = tile_of(layer, args, index);
            backward_tile(shared, tile, args, layer, prefetcher, slots, products, domega);
        }
        // The tables are not needed any more, and no other warp reads them.
        __syncwarp();
        float* partial = layer.partial + part * args.channels * COLUMNS;
        const long long channel = static_cast<long long>(group) * PART * PARTS + warp * OWN;
        write_partial(shared + TABLES_AT + warp * TABLE_BYTES, products, partial, channel, args.channels);
        if (OMEGA) write_domega(domega, partial, channel, args.channels);
        if (index < layer.tiles) read_kernels(shared, layer, args, index / layer.tiles_in_group);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) tensor_core_backward(const Args args) {
    extern __shared__ __align__(128) char shared[];
    // Rarely used values stay in shared memory, where they occupy no registers.
    Layer* layer = reinterpret_cast<Layer*>(shared + LAYER_AT);
    for (int left = static_cast<int>(args.depth); left > 0; left = layer->index) {
        __syncthreads();
        if (threadIdx.x == 0) *layer = layer_of(args, left - 1);
        __syncthreads();
        backward_layer(shared, args, *layer);
    }
    grid_sync(args.counter, static_cast<word>(args.depth) * gridDim.x);
    sum_partials(shared, args);
    reset_counter(args.counter);
}
