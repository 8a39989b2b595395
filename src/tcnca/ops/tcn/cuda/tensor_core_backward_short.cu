// Gradients of `depth` blocks y = x + activation(convolution(x)) on the tensor cores, in one launch.
//
// In one pass along a tile a warp recomputes the pre-activation of a block of steps, from it dz, and adds the products
// with dz to the kernels' gradients. BEFORE blocks later all dz that depend on a block's inputs are there, and its dx
// is written into the shared memory where its dy was. It is stored a step later, when all threads have synchronized,
// and the thread that has stored these bytes refills them.
//
// There is no shared memory left for the gradient of the output, of which the bottom layer adds omega times to its dx.
// The thread that stores a dx reads it, and the input, from the second-level cache.

#define X_RING (DEEP + 1)
#define DY_RING (DEEP + BEFORE + 1)

// The gradients of kernels and bias: one partial sum for all tiles of a block of the grid, added in a fixed order.

static_assert(K + BIAS <= 32, "one lane for each tap and the bias");

// Sum the matrices of products (step of x, step of dz) along their diagonals: one number per tap, and one for the bias.
__device__ __forceinline__ void write_partial(char* scratch, const float (&products)[PAIRS][PART][4], float* partial,
                                              long long channel, long long channels) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    float* square = reinterpret_cast<float*>(scratch);
    int from[SPAN];
#pragma unroll
    for (int n = 0; n < SPAN; ++n) {
        // The step of x that this lane's tap connects to step n.
        const int x = n - lane + AHEAD;
        from[n] = (BIAS && lane == K ? BLOCKS * SPAN : (AFTER - (x >> 3)) * SPAN + (x & 7)) * SPAN + n;
    }
#pragma unroll
    for (int c = 0; c < PART; ++c) {
#pragma unroll
        for (int p = 0; p < PAIRS; ++p)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                *reinterpret_cast<float2*>(square + ((2 * p + h) * SPAN + g) * SPAN + 2 * q) =
                    make_float2(products[p][c][2 * h], products[p][c][2 * h + 1]);
        __syncwarp();
        if (channel + c < channels && lane < K + BIAS) {
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < SPAN; ++n) sum += square[from[n]];
            partial[(channel + c) * COLUMNS + lane] = sum;
        }
        __syncwarp();
    }
}

#define BACKWARD_TABLE_SIZE (BLOCKS + RESIDUAL)
#define FORWARD_TABLE_BYTES (2 * BLOCKS * 32 * 16)
#define BACKWARD_TABLE_BYTES (2 * BACKWARD_TABLE_SIZE * 32 * 16)
#define TABLES_AT ((X_RING + DY_RING) * BLOCK_BYTES)
#define OFFSETS_AT (TABLES_AT + WARPS * (FORWARD_TABLE_BYTES + BACKWARD_TABLE_BYTES))
#define OMEGA_AT (OFFSETS_AT + WARPS * PART * 4)
#define LAYER_AT (OMEGA_AT + OMEGA * WARPS * PART * 4)
#define KERNELS_AT (LAYER_AT + LAYER_BYTES)

// Write the Toeplitz matrices of the warp's channels, for the pre-activation or, transposed, for dx. Operands of one
// instruction are adjacent: matrices 2p and 2p + 1 of one channel, then of the next.
template <int SIZE, bool BACK>
__device__ __forceinline__ void write_table(char* table, const float* kernels) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll 1
    for (int piece = 0; piece < 2 * SIZE; ++piece) {
        const bool paired = piece / 4 < SIZE / 2;
        Bytes16 v;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int i = paired ? piece / 4 * 2 + e % 2 : SIZE - 1;
            const float* kernel = kernels + (paired ? piece % 4 * 2 + e / 2 : piece % 2 * 4 + e) * K;
            if (BACK && i == BLOCKS) v.part[e] = pack(g == 2 * q ? 1.0f : 0.0f, g == 2 * q + 1 ? 1.0f : 0.0f);
            else if (BACK)
                v.part[e] = pack(tap(kernel, BLOCKS - 1 - i, 2 * q, g), tap(kernel, BLOCKS - 1 - i, 2 * q + 1, g));
            else v.part[e] = pack(Z_SCALE * tap(kernel, i, g, 2 * q), Z_SCALE * tap(kernel, i, g, 2 * q + 1));
        }
        store16(table + (piece * 32 + lane) * 16, v);
    }
}

// Read four of the warp's eight channels; the others are unchanged.
template <int SIZE>
__device__ __forceinline__ void read_table(word (&table)[SIZE][PART], const char* from, int half) {
#pragma unroll
    for (int i = 0; i < SIZE; i += 2) {
#pragma unroll
        for (int piece = 0; piece < (i + 1 < SIZE ? 2 : 1); ++piece) {
            const int at = i + 1 < SIZE ? 2 * i + 2 * half + piece : 2 * i + half;
            const Bytes16 v = load16(from + (at * 32 + threadIdx.x % 32) * 16);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (i + 1 < SIZE) table[i + e % 2][half * 4 + piece * 2 + e / 2] = v.part[e];
                else table[i][half * 4 + e] = v.part[e];
            }
        }
    }
}

// Compute dz of a block of steps from its dy.
__device__ __forceinline__ void compute_dz(word (&dz)[PART][2], const word (&inputs)[BLOCKS][PART][2],
                                           const word (&dy)[PART][2], const char* forward_table, const char* offsets,
                                           const Dropout& dropout, const Draws& draws) {
    const float scale = DROPOUT ? dropout.scale : 1.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        word table[BLOCKS][PART];
        read_table(table, forward_table, half);
#pragma unroll
        for (int own = 4 * half; own < 4 * half + 4; ++own) {
            const float offset = Z_SCALE * read_bias(offsets, own);
            float z[4] = {offset, offset, offset, offset};
            convolve(z, inputs, dy, table, own);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float values[2] = {first(dy[own][h]) * activation_grad_scaled(z[2 * h], scale),
                                   second(dy[own][h]) * activation_grad_scaled(z[2 * h + 1], scale)};
#pragma unroll
                for (int odd = 0; DROPOUT && odd < 2; ++odd)
                    if (!is_kept(dropout, draw(dropout, draws.index[h] + odd * draws.hop + half), own))
                        values[odd] = 0.0f;
                dz[own][h] = pack(values[0], values[1]);
            }
        }
    }
}

// Add the products of inputs and dz of a block of steps, from which the kernels' gradients are summed.
__device__ __forceinline__ void add_products(float (&products)[PAIRS][PART][4], const word (&inputs)[BLOCKS][PART][2],
                                             const word (&dz)[PART][2]) {
    const word one = pack(1.0f, 1.0f);
#pragma unroll
    for (int c = 0; c < PART; ++c) {
        const word b0 = transpose(dz[c][0]), b1 = transpose(dz[c][1]);
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            word a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int block = 2 * p + i % 2;
                a[i] = block < BLOCKS ? transpose(inputs[(2 * BLOCKS - block) % BLOCKS][c][i / 2])
                                      : (BIAS && block == BLOCKS ? one : 0);
            }
            multiply16(products[p][c], a[0], a[1], a[2], a[3], b0, b1);
        }
    }
}

// Compute dx of the block whose dy is in `ready`, in place.
__device__ __forceinline__ void compute_dx(char* ready, int mine, const word (&dz)[BLOCKS][PART][2],
                                           const char* back) {
    // The skip connection is one more matrix of the table, the identity.
    word rest[PART][2];
    if (RESIDUAL) read_block(rest, ready, mine);
    Bytes16 out[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        word table[BACKWARD_TABLE_SIZE][PART];
        read_table(table, back, half);
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
            float dx[2][4];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int own = 2 * j + c;
#pragma unroll
                for (int i = 0; i < 4; ++i) dx[c][i] = 0.0f;
                convolve(dx[c], dz, rest, table, own);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) out[i % 2][i / 2].part[j] = pack(dx[0][i], dx[1][i]);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) store16(ready + place_offset(mine, odd, h), out[odd][h]);
}

// For omega: where a thread reads the gradient of the output and the input, omega of its channels, and its gradient.
struct OmegaTerm {
    const number* dy;
    const number* x;
    const float* omega;
    float domega[PART];
};

// Store a block as `store_block` does, with omega times the gradient of the output, and add to the gradient of omega.
__device__ __forceinline__ void store_with_omega(const char* block, number* target, OmegaTerm& term, const Layer& layer,
                                                 int base, int n, int limit, int length) {
    Bytes16 dy[SPAN / STEPS_AT_ONCE], x[SPAN / STEPS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < SPAN; i += STEPS_AT_ONCE) {
        dy[i / STEPS_AT_ONCE] = x[i / STEPS_AT_ONCE] = {0, 0, 0, 0};
        if (n + i < length) {
            dy[i / STEPS_AT_ONCE] = load_global(term.dy + i * layer.output_hop);
            x[i / STEPS_AT_ONCE] = load_global(term.x + i * layer.x_hop);
        }
        // Of a later block; its input has been loaded for the kernels' gradients.
        if (n + i + 2 * SPAN < length) prefetch(term.dy + (i + 2 * SPAN) * layer.output_hop);
    }
#pragma unroll
    for (int i = 0; i < SPAN; i += STEPS_AT_ONCE) {
        Bytes16 v = load16(block + place_offset(base, i, 0));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const word gradient = dy[i / STEPS_AT_ONCE].part[j], input = x[i / STEPS_AT_ONCE].part[j];
            v.part[j] = pack(fmaf(term.omega[2 * j], first(gradient), first(v.part[j])),
                             fmaf(term.omega[2 * j + 1], second(gradient), second(v.part[j])));
            if (LENGTHS && n + i >= length) v.part[j] = 0;
            term.domega[2 * j] = fmaf(first(input), first(gradient), term.domega[2 * j]);
            term.domega[2 * j + 1] = fmaf(second(input), second(gradient), term.domega[2 * j + 1]);
        }
        if (n + i < limit) store_global(target + i * layer.dx_hop, v);
    }
    term.dy += SPAN * layer.output_hop;
    term.x += SPAN * layer.x_hop;
}

// Sum the threads' sums for the gradient of omega; all threads of the block take part.
__device__ __forceinline__ void write_domega(float* sums, const float (&domega)[PART], float* partial,
                                             long long channel, long long channels) {
    static_assert(32 % PARTS == 0 && PARTS * PART <= THREADS, "a warp has all channels, and a thread one to sum");
    __syncthreads();
#pragma unroll
    for (int c = 0; c < PART; ++c) {
        float sum = domega[c];
#pragma unroll
        for (int distance = 16; distance >= PARTS; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (threadIdx.x % 32 < PARTS) sums[(threadIdx.x / 32 * PARTS + threadIdx.x % 32) * PART + c] = sum;
    }
    __syncthreads();
    if (threadIdx.x < PARTS * PART && channel + threadIdx.x < channels) {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) sum += sums[warp * PARTS * PART + threadIdx.x];
        partial[(channel + threadIdx.x) * COLUMNS + K + BIAS] = sum;
    }
    __syncthreads();
}

__device__ __forceinline__ void backward_tile(char* shared, const Tile& tile, const Args& args, const Layer& layer,
                                              Prefetcher& prefetcher, int& x_slot, int& dy_slot,
                                              float (&products)[PAIRS][PART][4], OmegaTerm& term) {
    const long long channel = static_cast<long long>(tile.group) * PART * PARTS;
    char* x_ring = shared;
    char* dy_ring = x_ring + X_RING * BLOCK_BYTES;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int mine = place(2 * q, g, warp), moved = base_of_mover();
    const char* forward_table = shared + TABLES_AT + warp * (FORWARD_TABLE_BYTES + BACKWARD_TABLE_BYTES);
    const char* offsets = shared + OFFSETS_AT + warp * PART * 4;
    number* target =
        layer.dx + tile.row * args.time * args.channels + channel + offset_of(tile.mover, layer.cut, args.channels, 0);
    int written = tile.mover.begin;
    const bool adds = OMEGA && layer.index == 0;
    if (adds) {
        term.dy = args.dy + tile.row * args.dy_batch + channel + offset_of(tile.mover, layer.cut, args.dy_time, 0);
        term.x = layer.x + tile.row * layer.x_batch + channel + offset_of(tile.mover, layer.cut, layer.x_time, 0);
    }
    const Dropout dropout = dropout_of(args.seed, layer.index, tile.row, args.channels, args.dropped, args.scale);
    Draws draws = draws_for(layer.cut, dropout, tile.in_row, channel + warp * PART);
#pragma unroll
    for (int h = 0; h < 2; ++h) draws.index[h] += (tile.start - AFTER) * SPAN * draws.hop;

    word inputs[BLOCKS][PART][2], dz[BLOCKS][PART][2];
#pragma unroll
    for (int c = 0; c < PART; ++c)
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) inputs[i][c][0] = inputs[i][c][1] = dz[i][c][0] = dz[i][c][1] = 0;
#pragma unroll 1
    for (int s = tile.start; s < tile.end; ++s) {
        const int o = s - AFTER, e = o - BEFORE;
        wait_group<DEEP - 1>();
        __syncthreads();
        // The dx of the last step is where the next dy will be.
        char* last = dy_ring + later(dy_slot, DEEP, DY_RING) * BLOCK_BYTES;
        const int base_now = opaque(moved);
        if (e > 0) {
            if (adds) store_with_omega(last, target, term, layer, base_now, written, tile.mover.limit, tile.length);
            else store_block(last, target, layer.dx_hop, base_now, written, tile.mover.limit, tile.length);
            target += SPAN * layer.dx_hop;
            written += SPAN;
        }
        prefetch_next(prefetcher, x_ring + later(x_slot, DEEP, X_RING) * BLOCK_BYTES, last, nullptr, nullptr, base_now,
                      layer, args);
        shift_matrices(inputs);
        shift_matrices(dz);
        if (o < tile.dz_end) read_block(inputs[0], x_ring + x_slot * BLOCK_BYTES, mine);
        if (s >= 0 && o < tile.dz_end) {
            word dy[PART][2];
            read_block(dy, dy_ring + dy_slot * BLOCK_BYTES, mine);
            compute_dz(dz[0], inputs, dy, forward_table, offsets, dropout, draws);
        } else {
#pragma unroll
            for (int c = 0; c < PART; ++c) dz[0][c][0] = dz[0][c][1] = 0;
        }
        if (o >= 0 && o < tile.blocks) add_products(products, inputs, dz[0]);
        // The dy that was loaded BEFORE steps ago.
        char* ready = dy_ring + later(dy_slot, DEEP + 1, DY_RING) * BLOCK_BYTES;
        if (e >= 0) compute_dx(ready, mine, dz, forward_table + FORWARD_TABLE_BYTES);
        x_slot = later(x_slot, 1, X_RING);
        dy_slot = later(dy_slot, 1, DY_RING);
#pragma unroll
        for (int h = 0; h < 2; ++h) draws.index[h] += SPAN * draws.hop;
    }
    if (tile.start < tile.end) {
        __syncthreads();
        const char* last = dy_ring + later(dy_slot, DEEP, DY_RING) * BLOCK_BYTES;
        if (adds) store_with_omega(last, target, term, layer, moved, written, tile.mover.limit, tile.length);
        else store_block(last, target, layer.dx_hop, moved, written, tile.mover.limit, tile.length);
    }
}

// Read the kernels of the warp's channels to shared memory.
__device__ __forceinline__ void read_kernels(char* shared, const Layer& layer, const Args& args, int group) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long channel = (static_cast<long long>(group) * WARPS + warp) * PART;
    char* forward_table = shared + TABLES_AT + warp * (FORWARD_TABLE_BYTES + BACKWARD_TABLE_BYTES);
    float* kernels = reinterpret_cast<float*>(shared + KERNELS_AT) + warp * PART * K;
    const float* from = layer.weight + channel * K;
#pragma unroll
    for (int i = lane; i < PART * K; i += 32) kernels[i] = i < (args.channels - channel) * K ? from[i] : 0.0f;
    __syncwarp();
    write_table<BLOCKS, false>(forward_table, kernels);
    write_table<BACKWARD_TABLE_SIZE, true>(forward_table + FORWARD_TABLE_BYTES, kernels);
    write_bias(shared + OFFSETS_AT + warp * PART * 4, layer.bias, channel, args.channels);
    if (OMEGA && lane < PART)
        reinterpret_cast<float*>(shared + OMEGA_AT)[warp * PART + lane] =
            channel + lane < args.channels ? args.omega[channel + lane] : 0.0f;
}

// Process all tiles of a layer that belong to this block.
__device__ __forceinline__ void backward_layer(char* shared, const Args& args, const Layer& layer) {
    char* x_ring = shared;
    char* dy_ring = x_ring + X_RING * BLOCK_BYTES;
    const int warp = threadIdx.x / 32;
    int x_slot = 0, dy_slot = 0, index = blockIdx.x;
    // Read the first tile's kernels while other blocks finish the layer above.
    if (index < layer.tiles) read_kernels(shared, layer, args, index / layer.tiles_in_group);
    const word above = static_cast<word>(args.depth) - 1 - layer.index;
    if (above > 0) grid_sync(args.counter, above * gridDim.x);
    Prefetcher prefetcher = prefetcher_for(index);
#pragma unroll 1
    for (int i = 0; i < DEEP; ++i)
        prefetch_next(prefetcher, x_ring + i * BLOCK_BYTES, dy_ring + i * BLOCK_BYTES, nullptr, nullptr,
                      base_of_mover(), layer, args);

    while (index < layer.tiles) {
        const int group = index / layer.tiles_in_group, part = index - group * layer.tiles_in_group;
        float products[PAIRS][PART][4];
#pragma unroll
        for (int c = 0; c < PART; ++c)
#pragma unroll
            for (int p = 0; p < PAIRS; ++p)
#pragma unroll
                for (int i = 0; i < 4; ++i) products[p][c][i] = 0.0f;
        // A thread stores the same channels of every block.
        const float* omega = reinterpret_cast<const float*>(shared + OMEGA_AT) + threadIdx.x % PARTS * PART;
        OmegaTerm term = {nullptr, nullptr, omega};
#pragma unroll 1
        for (; index < (group + 1) * layer.tiles_in_group; index += gridDim.x) {
            const Tile tile = tile_of(layer, args, index);
            backward_tile(shared, tile, args, layer, prefetcher, x_slot, dy_slot, products, term);
        }
        // The tables are not needed any more, and no other warp reads them.
        __syncwarp();
        float* partial = layer.partial + part * args.channels * COLUMNS;
        const long long channel = static_cast<long long>(group) * PART * PARTS;
        write_partial(shared + TABLES_AT + warp * (FORWARD_TABLE_BYTES + BACKWARD_TABLE_BYTES), products, partial,
                      channel + warp * PART, args.channels);
        if (OMEGA && layer.index == 0)
            write_domega(reinterpret_cast<float*>(shared + TABLES_AT), term.domega, partial, channel, args.channels);
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
