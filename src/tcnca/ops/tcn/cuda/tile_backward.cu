// Gradients of `depth` blocks y = x + activation(convolution(x)) on the tensor cores, in one launch.
//
// In one walk along the tile a warp computes the pre-activation of a block of steps again, from it dz, and adds what dz
// gives to the kernels' gradients; BEFORE blocks later all dz are there that reach back to a block's inputs, and its
// dx is written into the shared memory where its dy lay. From there it goes out a step later, when all threads have
// met, and its place is filled again by the thread that has emptied it.

#define BACK_SIZE (BLOCKS + RESIDUAL)
#define FORTH_BYTES (2 * BLOCKS * 32 * 16)
#define BACK_BYTES (2 * BACK_SIZE * 32 * 16)
#define TABLES_AT ((X_RING + DY_RING) * BLOCK_BYTES)
#define OFFSETS_AT (TABLES_AT + WARPS * (FORTH_BYTES + BACK_BYTES))
#define LAYER_AT (OFFSETS_AT + WARPS * PART * 4)
#define KERNELS_AT (LAYER_AT + LAYER_BYTES)

// The Toeplitz matrices of the warp's channels, for the pre-activation or, turned round, for dx. What one instruction
// multiplies by lies side by side: matrices 2p and 2p + 1 of one channel, then of the next.
template <int SIZE, bool BACK>
__device__ __forceinline__ void write_table(char* table, const float* kernels) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll 1
    for (int piece = 0; piece < 2 * SIZE; ++piece) {
        const bool paired = piece / 4 < SIZE / 2;
        Four v;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int i = paired ? piece / 4 * 2 + e % 2 : SIZE - 1;
            const float* kernel = kernels + (paired ? piece % 4 * 2 + e / 2 : piece % 2 * 4 + e) * K;
            if (BACK && i == BLOCKS) v.part[e] = pack(g == 2 * q ? 1.0f : 0.0f, g == 2 * q + 1 ? 1.0f : 0.0f);
            else if (BACK)
                v.part[e] = pack(tap(kernel, BLOCKS - 1 - i, 2 * q, g), tap(kernel, BLOCKS - 1 - i, 2 * q + 1, g));
            else v.part[e] = pack(OF_Z * tap(kernel, i, g, 2 * q), OF_Z * tap(kernel, i, g, 2 * q + 1));
        }
        write_four(table + (piece * 32 + lane) * 16, v);
    }
}

// Four of the warp's eight channels; the others stay as they are.
template <int SIZE>
__device__ __forceinline__ void read_table(word (&table)[SIZE][PART], const char* from, int half) {
#pragma unroll
    for (int i = 0; i < SIZE; i += 2) {
#pragma unroll
        for (int piece = 0; piece < (i + 1 < SIZE ? 2 : 1); ++piece) {
            const int at = i + 1 < SIZE ? 2 * i + 2 * half + piece : 2 * i + half;
            const Four v = read_four(from + (at * 32 + threadIdx.x % 32) * 16);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                if (i + 1 < SIZE) table[i + e % 2][half * 4 + piece * 2 + e / 2] = v.part[e];
                else table[i][half * 4 + e] = v.part[e];
            }
        }
    }
}

__device__ __forceinline__ int later(int slot, int steps, int ring) {
    return slot + steps >= ring ? slot + steps - ring : slot + steps;
}

// dz of a block of steps, from its dy.
__device__ __forceinline__ void flow_through(word (&flow)[PART][2], const word (&seen)[BLOCKS][PART][2], int u,
                                             const word (&dy)[PART][2], const char* forth, const char* offsets,
                                             const Dropout& dropout, const Draws& draws) {
    const float scale = DROPOUT ? dropout.scale : 1.0f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        word table[BLOCKS][PART];
        read_table(table, forth, half);
#pragma unroll
        for (int own = 4 * half; own < 4 * half + 4; ++own) {
            const float offset = OF_Z * read_bias(offsets, own);
            float z[4] = {offset, offset, offset, offset};
            convolve(z, seen, dy, table, u, own);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float dz[2] = {first(dy[own][h]) * slope_of(z[2 * h], scale),
                               second(dy[own][h]) * slope_of(z[2 * h + 1], scale)};
#pragma unroll
                for (int odd = 0; DROPOUT && odd < 2; ++odd)
                    if (!stays(dropout, draw(dropout, draws.index[h] + odd * draws.hop + half), own)) dz[odd] = 0.0f;
                flow[own][h] = pack(dz[0], dz[1]);
            }
        }
    }
}

// What dz of a block of steps gives to the kernels' gradients.
__device__ __forceinline__ void add_products(float (&products)[PAIRS][PART][4], const word (&seen)[BLOCKS][PART][2],
                                             const word (&flow)[PART][2], int u) {
    const word one = pack(1.0f, 1.0f);
#pragma unroll
    for (int c = 0; c < PART; ++c) {
        const word b0 = transpose(flow[c][0]), b1 = transpose(flow[c][1]);
#pragma unroll
        for (int p = 0; p < PAIRS; ++p) {
            word a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int block = 2 * p + i % 2;
                a[i] = block < BLOCKS ? transpose(seen[(u - block + 2 * BLOCKS) % BLOCKS][c][i / 2])
                                      : (BIAS && block == BLOCKS ? one : 0);
            }
            multiply16(products[p][c], a[0], a[1], a[2], a[3], b0, b1);
        }
    }
}

// dx of the block whose dy lies in `ready`, in its place.
__device__ __forceinline__ void flow_back(char* ready, int mine, const word (&flow)[BLOCKS][PART][2], int u,
                                          const char* back) {
    // The skip connection is one more matrix to multiply by.
    word rest[PART][2];
    if (RESIDUAL) read_block(rest, ready, mine);
    Four out[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        word table[BACK_SIZE][PART];
        read_table(table, back, half);
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; ++j) {
            float dx[2][4];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int own = 2 * j + c;
#pragma unroll
                for (int i = 0; i < 4; ++i) dx[c][i] = 0.0f;
                convolve(dx[c], flow, rest, table, u, own);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) out[i % 2][i / 2].part[j] = pack(dx[0][i], dx[1][i]);
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) write_four(ready + beside(mine, odd, h), out[odd][h]);
}

__device__ __forceinline__ void backward_tile(char* shared, const Tile& tile, const Job& job, const Layer& layer,
                                              Feeder& feeder, int& x_slot, int& dy_slot,
                                              float (&products)[PAIRS][PART][4]) {
    const long long channel = static_cast<long long>(tile.group) * PART * WARPS;
    char* x_ring = shared;
    char* dy_ring = x_ring + X_RING * BLOCK_BYTES;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int mine = place(2 * q, g, warp), moved = base_of_mover();
    const char* forth = shared + TABLES_AT + warp * (FORTH_BYTES + BACK_BYTES);
    const char* offsets = shared + OFFSETS_AT + warp * PART * 4;
    number* target =
        layer.dx + tile.row * job.time * job.channels + channel + offset_of(tile.mover, layer.cut, job.channels, 0);
    int written = tile.mover.begin;
    const Dropout dropout = dropout_of(job.seed, layer.number_of, tile.row, job.channels, job.dropped, job.scale);
    Draws draws = draws_for(layer.cut, dropout, tile.in_row, channel + warp * PART);
#pragma unroll
    for (int h = 0; h < 2; ++h) draws.index[h] += (tile.start - AFTER) * SPAN * draws.hop;

    word seen[BLOCKS][PART][2], flow[BLOCKS][PART][2];
#pragma unroll
    for (int c = 0; c < PART; ++c)
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) seen[i][c][0] = seen[i][c][1] = flow[i][c][0] = flow[i][c][1] = 0;
#pragma unroll 1
    for (int base = tile.start; base < tile.end; base += TURNS) {
#pragma unroll
        for (int u = 0; u < TURNS; ++u) {
            const int s = base + u, o = s - AFTER, e = o - BEFORE;
            if (s >= tile.end) break;
            arrived<DEEP - 1>();
            __syncthreads();
            // The dx of the last step lies where the next dy will.
            char* last = dy_ring + later(dy_slot, DEEP, DY_RING) * BLOCK_BYTES;
            const int base_now = veiled(moved);
            if (e > 0) {
                put(last, target, layer.dx_hop, base_now, written, tile.mover.limit, tile.length);
                target += SPAN * layer.dx_hop;
                written += SPAN;
            }
            feed(feeder, x_ring + later(x_slot, DEEP, X_RING) * BLOCK_BYTES, last, base_now, layer, job);
            grow_older(seen);
            grow_older(flow);
            if (o < tile.flowing) read_block(seen[u], x_ring + x_slot * BLOCK_BYTES, mine);
            if (s >= 0 && o < tile.flowing) {
                word dy[PART][2];
                read_block(dy, dy_ring + dy_slot * BLOCK_BYTES, mine);
                flow_through(flow[u], seen, u, dy, forth, offsets, dropout, draws);
            } else {
#pragma unroll
                for (int c = 0; c < PART; ++c) flow[u][c][0] = flow[u][c][1] = 0;
            }
            if (o >= 0 && o < tile.blocks) add_products(products, seen, flow[u], u);
            // BEFORE slots earlier.
            char* ready = dy_ring + later(dy_slot, DEEP + 1, DY_RING) * BLOCK_BYTES;
            if (e >= 0) flow_back(ready, mine, flow, u, forth + FORTH_BYTES);
            x_slot = later(x_slot, 1, X_RING);
            dy_slot = later(dy_slot, 1, DY_RING);
#pragma unroll
            for (int h = 0; h < 2; ++h) draws.index[h] += SPAN * draws.hop;
        }
    }
    if (tile.start < tile.end) {
        __syncthreads();
        put(dy_ring + later(dy_slot, DEEP, DY_RING) * BLOCK_BYTES, target, layer.dx_hop, moved, written,
            tile.mover.limit, tile.length);
    }
}

// Kernels of the warp's channels to shared memory.
__device__ __forceinline__ void read_kernels(char* shared, const Layer& layer, const Job& job, int group) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long channel = (static_cast<long long>(group) * WARPS + warp) * PART;
    char* forth = shared + TABLES_AT + warp * (FORTH_BYTES + BACK_BYTES);
    float* kernels = reinterpret_cast<float*>(shared + KERNELS_AT) + warp * PART * K;
    const float* from = layer.weight + channel * K;
#pragma unroll
    for (int i = lane; i < PART * K; i += 32) kernels[i] = i < (job.channels - channel) * K ? from[i] : 0.0f;
    __syncwarp();
    write_table<BLOCKS, false>(forth, kernels);
    write_table<BACK_SIZE, true>(forth + FORTH_BYTES, kernels);
    write_bias(shared + OFFSETS_AT + warp * PART * 4, layer.bias, channel, job.channels);
}

// All tiles of a layer that are this block's.
__device__ __forceinline__ void backward_layer(char* shared, const Job& job, const Layer& layer) {
    char* x_ring = shared;
    char* dy_ring = x_ring + X_RING * BLOCK_BYTES;
    const int warp = threadIdx.x / 32;
    int x_slot = 0, dy_slot = 0, index = blockIdx.x;
    // What a layer starts with can be read while waiting for the last tiles of the one before it.
    if (index < layer.tiles) read_kernels(shared, layer, job, index / layer.tiles_in_group);
    const word above = static_cast<word>(job.depth) - 1 - layer.number_of;
    if (above > 0) meet(job.counter, above * gridDim.x);
    Feeder feeder = feeder_for(index);
#pragma unroll 1
    for (int i = 0; i < DEEP; ++i)
        feed(feeder, x_ring + i * BLOCK_BYTES, dy_ring + i * BLOCK_BYTES, base_of_mover(), layer, job);

    while (index < layer.tiles) {
        const int group = index / layer.tiles_in_group, part = index - group * layer.tiles_in_group;
        float products[PAIRS][PART][4];
#pragma unroll
        for (int c = 0; c < PART; ++c)
#pragma unroll
            for (int p = 0; p < PAIRS; ++p)
#pragma unroll
                for (int i = 0; i < 4; ++i) products[p][c][i] = 0.0f;
#pragma unroll 1
        for (; index < (group + 1) * layer.tiles_in_group; index += gridDim.x) {
            const Tile tile = tile_of(layer, job, index);
            backward_tile(shared, tile, job, layer, feeder, x_slot, dy_slot, products);
        }
        // The tables have done their duty, and only this warp reads them.
        __syncwarp();
        write_partial(shared + TABLES_AT + warp * (FORTH_BYTES + BACK_BYTES), products,
                      layer.partial + part * job.channels * (K + BIAS),
                      (static_cast<long long>(group) * WARPS + warp) * PART, job.channels);
        if (index < layer.tiles) read_kernels(shared, layer, job, index / layer.tiles_in_group);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) tile_backward(const Job job) {
    extern __shared__ __align__(128) char shared[];
    // What is seldom looked at lies in shared memory, where it takes no registers.
    Layer* layer = reinterpret_cast<Layer*>(shared + LAYER_AT);
    for (int left = static_cast<int>(job.depth); left > 0; left = layer->number_of) {
        __syncthreads();
        if (threadIdx.x == 0) *layer = layer_of(job, left - 1);
        __syncthreads();
        backward_layer(shared, job, *layer);
    }
    meet(job.counter, static_cast<word>(job.depth) * gridDim.x);
    add_up(shared, job);
    leave(job.counter);
}
