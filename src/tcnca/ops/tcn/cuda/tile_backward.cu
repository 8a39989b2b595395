// Gradients of `depth` blocks y = x + activation(convolution(x)) on the tensor cores, in one launch.
//
// In one walk along the tile a warp computes the pre-activation of a block of steps again, from it dz, and adds what dz
// gives to the kernels' gradients; BEFORE blocks later all dz are there that reach back to a block's inputs, and its
// dx is written into the shared memory where its dy lay.

#define X_RING (DEEP + 1)
#define DY_RING (DEEP + BEFORE + 1)
#define TABLE_BYTES (WARPS * BLOCKS * 2 * 32 * 16)

struct Job {
    const number* x;
    const number* inner;
    const float* weight;
    const float* bias;
    const number* dy;
    number* dx;
    number* flow;
    const long long* lengths;
    float* partial;
    float* dweight;
    float* dbias;
    word* counter;
    long long rows, time, channels, x_time, x_batch, dy_time, dy_batch, dilation, factor, depth;
    long long steps[LAYERS];
};

struct Layer {
    const number* x;
    const number* dy;
    number* dx;
    const float* weight;
    const float* bias;
    float* partial;
    long long x_time, x_batch, dy_time, dy_batch;
};

// The Toeplitz matrices of the warp's channels, for the pre-activation and, turned round, for dx.
__device__ __forceinline__ void write_tables(char* forth, char* back, const Layer& layer, long long channel,
                                             long long channels) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            Four there, here;
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const long long own = channel + half * 4 + c;
                const bool real = own < channels;
                const float* kernel = layer.weight + (real ? own : 0) * K;
                there.part[c] = real ? pack(tap(kernel, i, g, 2 * q), tap(kernel, i, g, 2 * q + 1)) : 0;
                const int turned = BLOCKS - 1 - i;
                here.part[c] = real ? pack(tap(kernel, turned, 2 * q, g), tap(kernel, turned, 2 * q + 1, g)) : 0;
            }
            write_four(forth + ((i * 2 + half) * 32 + lane) * 16, there);
            write_four(back + ((i * 2 + half) * 32 + lane) * 16, here);
        }
    __syncwarp();
}

// Four of the warp's eight channels; the others stay as they are.
__device__ __forceinline__ void read_table(word (&table)[BLOCKS][PART], const char* from, int half) {
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) {
        const Four v = read_four(from + ((i * 2 + half) * 32 + threadIdx.x % 32) * 16);
#pragma unroll
        for (int c = 0; c < 4; ++c) table[i][half * 4 + c] = v.part[c];
    }
}

__device__ __forceinline__ void backward_tile(char* shared, const Cut& cut, int tile_in_row, long long row_number,
                                              long long channel, const Job& job, const Layer& layer, float* partial) {
    const Mover mover = mover_for(cut, job.time, tile_in_row, job.channels - channel);
    const int length = LENGTHS ? min(mover.limit, steps_before(job.lengths[row_number], mover.phase, cut.dilation))
                               : mover.limit;
    const long long x_hop = cut.dilation * layer.x_time, dy_hop = cut.dilation * layer.dy_time;
    const long long dx_hop = cut.dilation * job.channels;

    const int first_segment = static_cast<int>(tile_in_row * CHAINS / cut.dilation);
    const int last_segment = static_cast<int>((tile_in_row * CHAINS + CHAINS - 1) / cut.dilation);
    const int steps = static_cast<int>(cut.steps), left = static_cast<int>(cut.chain) - first_segment * steps;
    const int blocks = ((left < steps ? left : steps) + SPAN - 1) / SPAN;
    // Nothing lies before the start of the sequence, and no gradient comes from behind its end.
    const int start = last_segment == 0 ? 0 : -(BEFORE + AFTER);
    const int end = blocks + BEFORE + AFTER;
    const int flowing = first_segment + 1 == static_cast<int>(cut.segments) ? blocks : blocks + BEFORE;

    char* x_ring = shared;
    char* dy_ring = x_ring + X_RING * BLOCK_BYTES;
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int mine = place(2 * q, g, warp);
    char* forth = dy_ring + DY_RING * BLOCK_BYTES + warp * (TABLE_BYTES / WARPS);
    char* back = forth + TABLE_BYTES;
    char* offsets = dy_ring + DY_RING * BLOCK_BYTES + 2 * TABLE_BYTES + warp * PART * 4;

    const number* source = layer.x + row_number * layer.x_batch + channel + offset_of(mover, cut, layer.x_time, start);
    const number* slopes =
        layer.dy + row_number * layer.dy_batch + channel + offset_of(mover, cut, layer.dy_time, start - AFTER);
    number* target = layer.dx + row_number * job.time * job.channels + channel + offset_of(mover, cut, job.channels, 0);
    int asked = mover.begin + start * SPAN, written = mover.begin;
#pragma unroll
    for (int i = 0; i < DEEP; ++i) {
        const int s = start + i;
        if (s - AFTER < flowing) {
            ask(x_ring + i * BLOCK_BYTES, source, x_hop, mover.base, asked, length);
            if (s >= 0) ask(dy_ring + i * BLOCK_BYTES, slopes, dy_hop, mover.base, asked - AFTER * SPAN, mover.limit);
        }
        source += SPAN * x_hop;
        slopes += SPAN * dy_hop;
        asked += SPAN;
        close_group();
    }
    write_tables(forth, back, layer, channel + warp * PART, job.channels);
    write_bias(offsets, layer.bias, channel + warp * PART, job.channels);

    word seen[BLOCKS][PART][2], flow[BLOCKS][PART][2];
    float products[PAIRS][PART][4];
#pragma unroll
    for (int c = 0; c < PART; ++c) {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) seen[i][c][0] = seen[i][c][1] = flow[i][c][0] = flow[i][c][1] = 0;
#pragma unroll
        for (int p = 0; p < PAIRS; ++p)
#pragma unroll
            for (int i = 0; i < 4; ++i) products[p][c][i] = 0.0f;
    }
    const word one = pack(1.0f, 1.0f);
    int x_slot = 0, dy_slot = 0;
    for (int base = start; base < end; base += BLOCKS) {
#pragma unroll
        for (int u = 0; u < BLOCKS; ++u) {
            const int s = base + u, o = s - AFTER, e = o - BEFORE;
            if (s >= end) break;
            arrived<DEEP - 1>();
            __syncthreads();
            if (o + DEEP < flowing) {
                const int x_next = x_slot == 0 ? X_RING - 1 : x_slot - 1;
                const int dy_next = dy_slot + DEEP >= DY_RING ? dy_slot + DEEP - DY_RING : dy_slot + DEEP;
                ask(x_ring + x_next * BLOCK_BYTES, source, x_hop, mover.base, asked, length);
                if (s + DEEP >= 0)
                    ask(dy_ring + dy_next * BLOCK_BYTES, slopes, dy_hop, mover.base, asked - AFTER * SPAN, mover.limit);
                source += SPAN * x_hop;
                slopes += SPAN * dy_hop;
                asked += SPAN;
            }
            close_group();
            if (o < flowing) {
                const char* block = x_ring + x_slot * BLOCK_BYTES;
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
            }
            char* ready = dy_ring + (dy_slot < BEFORE ? dy_slot + DY_RING - BEFORE : dy_slot - BEFORE) * BLOCK_BYTES;
            if (s >= 0 && o < flowing) {
                const char* block = dy_ring + dy_slot * BLOCK_BYTES;
                Four dy[2][2];
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd)
                        dy[odd][h] = read_four(block + beside(mine, odd, h));
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    word table[BLOCKS][PART];
                    read_table(table, forth, half);
#pragma unroll
                    for (int c = 0; c < 4; ++c) {
                        const int own = half * 4 + c;
                        const float offset = read_bias(offsets, own);
                        float z[4] = {offset, offset, offset, offset};
                        convolve(z, seen, table, u, own);
#pragma unroll
                        for (int h = 0; h < 2; ++h) {
                            const word here = dy[0][h].part[own / 2], next = dy[1][h].part[own / 2];
                            flow[u][own][h] = pack((own % 2 ? second(here) : first(here)) * slope(z[2 * h]),
                                                   (own % 2 ? second(next) : first(next)) * slope(z[2 * h + 1]));
                        }
                    }
                }
            } else {
#pragma unroll
                for (int c = 0; c < PART; ++c) flow[u][c][0] = flow[u][c][1] = 0;
            }
            if (o >= 0 && o < blocks) {
#pragma unroll
                for (int c = 0; c < PART; ++c) {
                    const word b0 = transpose(flow[u][c][0]), b1 = transpose(flow[u][c][1]);
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
            if (e >= 0) {
                Four rest[2][2], out[2][2];
                if (RESIDUAL) {
#pragma unroll
                    for (int h = 0; h < 2; ++h)
#pragma unroll
                        for (int odd = 0; odd < 2; ++odd)
                            rest[odd][h] = read_four(ready + beside(mine, odd, h));
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    word table[BLOCKS][PART];
                    read_table(table, back, half);
#pragma unroll
                    for (int j = 2 * half; j < 2 * half + 2; ++j) {
                        float dx[2][4];
#pragma unroll
                        for (int c = 0; c < 2; ++c) {
#pragma unroll
                            for (int i = 0; i < 4; ++i) {
                                const word pair = RESIDUAL ? rest[i % 2][i / 2].part[j] : 0;
                                dx[c][i] = RESIDUAL ? (c ? second(pair) : first(pair)) : 0.0f;
                            }
                            convolve(dx[c], flow, table, u, 2 * j + c);
                        }
#pragma unroll
                        for (int i = 0; i < 4; ++i) out[i % 2][i / 2].part[j] = pack(dx[0][i], dx[1][i]);
                    }
                }
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int odd = 0; odd < 2; ++odd)
                        write_four(ready + beside(mine, odd, h), out[odd][h]);
                __syncthreads();
                put(ready, target, dx_hop, mover.base, written, mover.limit, length);
                target += SPAN * dx_hop;
                written += SPAN;
            }
            x_slot = x_slot == X_RING - 1 ? 0 : x_slot + 1;
            dy_slot = dy_slot == DY_RING - 1 ? 0 : dy_slot + 1;
        }
    }
    __syncthreads();
    write_partial(x_ring + warp * (2 * PAIRS * SPAN * SPAN * 4), products, partial, channel + warp * PART, job.channels);
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) tile_backward(const Job job) {
    extern __shared__ __align__(128) char shared[];
    const int groups = static_cast<int>((job.channels + PART * WARPS - 1) / (PART * WARPS));
    const long long tensor = job.rows * job.time * job.channels, width = job.channels * (K + BIAS);
    const long long packed = job.time * job.channels;
    for (int number_of = static_cast<int>(job.depth) - 1; number_of >= 0; --number_of) {
        // The parts of the layers before this one come first.
        float* partial = job.partial;
        long long dilation = job.dilation;
        Cut cut;
        for (int i = 0;; ++i) {
            cut = cut_time(job.time, dilation, job.steps[i]);
            if (i == number_of) break;
            partial += cut.tiles_in_row * job.rows * width;
            dilation = min(dilation * job.factor, job.time);
        }
        const bool top = number_of + 1 == job.depth, bottom = number_of == 0;
        Layer layer;
        layer.x = bottom ? job.x : job.inner + (number_of - 1) * tensor;
        layer.x_time = bottom ? job.x_time : job.channels;
        layer.x_batch = bottom ? job.x_batch : packed;
        layer.dy = top ? job.dy : job.flow + (job.depth - number_of) % 2 * tensor;
        layer.dy_time = top ? job.dy_time : job.channels;
        layer.dy_batch = top ? job.dy_batch : packed;
        layer.dx = bottom ? job.dx : job.flow + (job.depth - 1 - number_of) % 2 * tensor;
        layer.weight = job.weight + number_of * job.channels * K;
        layer.bias = job.bias + number_of * job.channels;
        const int tiles_in_group = static_cast<int>(cut.tiles_in_row * job.rows);
        for (int tile = blockIdx.x; tile < tiles_in_group * groups; tile += gridDim.x) {
            const int in_group = tile % tiles_in_group;
            backward_tile(shared, cut, in_group % static_cast<int>(cut.tiles_in_row),
                         in_group / static_cast<int>(cut.tiles_in_row),
                          static_cast<long long>(tile / tiles_in_group) * PART * WARPS, job, layer,
                          partial + in_group * width);
        }
        meet(job.counter, static_cast<word>(job.depth - number_of) * gridDim.x);
    }
    add_up(shared, job);
    leave(job.counter);
}
