// Shared by the kernels for gradients on the tensor cores: layers, tiles, loads ahead, and the sums of gradients.
//
// RELOAD: whether dy is loaded a second time, for the skip connection, when the dx of its block is computed.
// RELOAD_OUTPUT: whether the gradient of the output is loaded then, for omega.

struct Args {
    const number* x;
    const number* inner;
    const float* weight;
    const float* bias;
    const number* dy;
    number* dx;
    number* scratch;
    const long long* lengths;
    const long long* seed;
    const float* omega;
    float* partial;
    float* dweight;
    float* dbias;
    float* domega;
    word* counter;
    long long rows, time, channels, x_time, x_batch, dy_time, dy_batch, dilation, factor, depth, dropped;
    double scale;
    long long steps[LAYERS];
};

#define COLUMNS (K + BIAS + OMEGA)  // of the partial sums of a channel

struct Layer {
    int index;
    Cut cut;
    int tiles_in_group, tiles;
    const number* x;
    const number* dy;
    number* dx;
    const float* weight;
    const float* bias;
    float* partial;
    long long x_time, x_batch, dy_time, dy_batch;
    long long x_hop, dy_hop, dx_hop, output_hop;  // between two steps of a chain
};

static_assert(sizeof(Layer) <= LAYER_BYTES, "LAYER_BYTES is too small");

__device__ __forceinline__ Layer layer_of(const Args& args, int index) {
    Layer layer;
    layer.index = index;
    // The partial sums of the layers before this one come first.
    layer.partial = args.partial;
    long long dilation = args.dilation;
    for (int i = 0;; ++i) {
        layer.cut = cut_time(args.time, dilation, args.steps[i]);
        layer.tiles_in_group = static_cast<int>(layer.cut.tiles_in_row * args.rows);
        if (i == index) break;
        layer.partial += min(layer.tiles_in_group, static_cast<int>(gridDim.x)) * args.channels * COLUMNS;
        dilation = min(dilation * args.factor, args.time);
    }
    layer.tiles = layer.tiles_in_group * static_cast<int>((args.channels + PART * PARTS - 1) / (PART * PARTS));
    const bool top = index + 1 == args.depth, bottom = index == 0;
    const long long packed = args.time * args.channels, tensor = args.rows * packed;
    layer.x = bottom ? args.x : args.inner + (index - 1) * tensor;
    layer.x_time = bottom ? args.x_time : args.channels;
    layer.x_batch = bottom ? args.x_batch : packed;
    layer.dy = top ? args.dy : index % 2 ? args.dx : args.scratch;
    layer.dy_time = top ? args.dy_time : args.channels;
    layer.dy_batch = top ? args.dy_batch : packed;
    layer.dx = index % 2 ? args.scratch : args.dx;
    layer.x_hop = layer.cut.dilation * layer.x_time;
    layer.dy_hop = layer.cut.dilation * layer.dy_time;
    layer.dx_hop = layer.cut.dilation * args.channels;
    layer.output_hop = layer.cut.dilation * args.dy_time;
    layer.weight = args.weight + index * args.channels * K;
    layer.bias = args.bias + index * args.channels;
    return layer;
}

// The blocks of one tile. Block s of x is loaded together with block s - AFTER of dy.
struct Tile {
    int index, group, in_row;
    long long row;
    int start, end, blocks, dz_end;
    Mover mover;
    int length;
};

__device__ __forceinline__ Tile tile_of(const Layer& layer, const Args& args, int index) {
    Tile tile;
    tile.index = index;
    tile.group = index / layer.tiles_in_group;
    const int in_group = index - tile.group * layer.tiles_in_group;
    const int tiles_in_row = static_cast<int>(layer.cut.tiles_in_row);
    tile.row = in_group / tiles_in_row;
    tile.in_row = in_group % tiles_in_row;
    const Extent extent = extent_of(layer.cut, args.time, tile.in_row);
    tile.blocks = extent.blocks;
    // There is nothing before the start of the sequence, and no gradient from behind its end.
    tile.start = extent.last == 0 ? 0 : -(BEFORE + AFTER);
    tile.dz_end = extent.first + 1 == static_cast<int>(layer.cut.segments) ? tile.blocks : tile.blocks + BEFORE;
    // A tile without steps has nothing to do.
    tile.end = tile.blocks == 0 ? tile.start : tile.blocks + BEFORE + AFTER;
    tile.mover = mover_for(layer.cut, args.time, tile.in_row, args.channels - tile.group * PART * PARTS);
    tile.length = LENGTHS ? min(tile.mover.limit,
                                steps_before(args.lengths[tile.row], tile.mover.phase, layer.cut.dilation))
                          : tile.mover.limit;
    return tile;
}

// Loads the blocks of all tiles of a layer in the order in which they are processed, DEEP of them ahead: the next
// tile's first blocks are loaded while the last ones of a tile are still processed.
struct Prefetcher {
    int index;  // of the tile
    int s, end, dz_end;
    int x_step, limit, length;
    const number* source;
    const number* dy_source;
    int skip_step;
    const number* skip_source;
    const number* output_source;  // of the gradient of the output
};

__device__ __forceinline__ Prefetcher prefetcher_for(int index) {
    Prefetcher prefetcher;
    prefetcher.index = index - static_cast<int>(gridDim.x);
    prefetcher.s = prefetcher.end = 0;
    return prefetcher;
}

// Advance to the next tile of this block of the grid that has steps.
__device__ __forceinline__ void next_tile(Prefetcher& prefetcher, const Layer& layer, const Args& args) {
    while (prefetcher.s == prefetcher.end && prefetcher.index < layer.tiles) {
        prefetcher.index += gridDim.x;
        if (prefetcher.index >= layer.tiles) break;
        const Tile tile = tile_of(layer, args, prefetcher.index);
        const long long channel = static_cast<long long>(tile.group) * PART * PARTS;
        prefetcher.s = tile.start;
        prefetcher.end = tile.end;
        prefetcher.dz_end = tile.dz_end;
        prefetcher.x_step = tile.mover.begin + tile.start * SPAN;
        prefetcher.limit = tile.mover.limit;
        prefetcher.length = tile.length;
        prefetcher.source =
            layer.x + tile.row * layer.x_batch + channel + offset_of(tile.mover, layer.cut, layer.x_time, tile.start);
        prefetcher.dy_source = layer.dy + tile.row * layer.dy_batch + channel +
                               offset_of(tile.mover, layer.cut, layer.dy_time, tile.start - AFTER);
        if (!RELOAD && !RELOAD_OUTPUT) continue;
        prefetcher.skip_step = tile.mover.begin;
        prefetcher.skip_source =
            layer.dy + tile.row * layer.dy_batch + channel + offset_of(tile.mover, layer.cut, layer.dy_time, 0);
        prefetcher.output_source =
            args.dy + tile.row * args.dy_batch + channel + offset_of(tile.mover, layer.cut, args.dy_time, 0);
    }
}

// Load the next blocks of x and dy to these addresses, with RELOAD also the dy of the block whose dx is next to be
// computed, with RELOAD_OUTPUT in the bottom layer the gradient of the output. `base` is `base_of_mover()`.
__device__ __forceinline__ void prefetch_next(Prefetcher& prefetcher, char* x_to, char* dy_to, char* skip_to,
                                              char* output_to, int base, const Layer& layer, const Args& args) {
    if (prefetcher.s == prefetcher.end) next_tile(prefetcher, layer, args);
    if (prefetcher.s < prefetcher.end) {
        if (prefetcher.s - AFTER < prefetcher.dz_end) {
            load_block(x_to, prefetcher.source, layer.x_hop, base, prefetcher.x_step, prefetcher.length);
            if (prefetcher.s >= 0)
                load_block(dy_to, prefetcher.dy_source, layer.dy_hop, base, prefetcher.x_step - AFTER * SPAN,
                           prefetcher.limit);
            prefetcher.source += SPAN * layer.x_hop;
            prefetcher.dy_source += SPAN * layer.dy_hop;
            prefetcher.x_step += SPAN;
        }
        if ((RELOAD || RELOAD_OUTPUT) && prefetcher.s >= AFTER + BEFORE) {
            if (RELOAD)
                load_block(skip_to, prefetcher.skip_source, layer.dy_hop, base, prefetcher.skip_step, prefetcher.limit);
            if (RELOAD_OUTPUT && layer.index == 0)
                load_block(output_to, prefetcher.output_source, layer.output_hop, base, prefetcher.skip_step,
                           prefetcher.limit);
            prefetcher.skip_source += SPAN * layer.dy_hop;
            prefetcher.output_source += SPAN * layer.output_hop;
            prefetcher.skip_step += SPAN;
        }
        ++prefetcher.s;
    }
    commit_group();
}

// Add the partial sums of every layer.
__device__ __forceinline__ void sum_partials(char* shared, const Args& args) {
    float* sums = reinterpret_cast<float*>(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long width = args.channels * COLUMNS, strips = (width + 31) / 32;
    const float* partial = args.partial;
    long long dilation = args.dilation;
    for (int layer = 0; layer < args.depth; ++layer) {
        const Cut cut = cut_time(args.time, dilation, args.steps[layer]);
        const int parts = min(static_cast<int>(cut.tiles_in_row * args.rows), static_cast<int>(gridDim.x));
        // Layers start at different blocks, so that all of the grid is busy.
        const long long turn = (layer * strips + gridDim.x - blockIdx.x) % gridDim.x;
        for (long long strip = turn == 0 ? 0 : gridDim.x - turn; strip < strips; strip += gridDim.x) {
            const long long column = strip * 32 + lane;
            float sum = 0.0f;
            if (column < width) {
#pragma unroll 8
                for (int part = warp; part < parts; part += WARPS) sum += __ldcg(partial + part * width + column);
            }
            sums[warp * 32 + lane] = sum;
            __syncthreads();
            if (warp == 0 && column < width) {
#pragma unroll
                for (int i = 1; i < WARPS; ++i) sum += sums[i * 32 + lane];
                const long long channel = column / COLUMNS;
                const int j = static_cast<int>(column % COLUMNS);
                if (j < K) args.dweight[(layer * args.channels + channel) * K + j] = sum;
                else if (BIAS && j == K) args.dbias[layer * args.channels + channel] = sum;
                else if (layer == 0) args.domega[channel] = sum;
            }
            __syncthreads();
        }
        partial += parts * width;
        dilation = min(dilation * args.factor, args.time);
    }
}

#define PAIRS ((BLOCKS + BIAS + 1) / 2)

__device__ __forceinline__ int later(int slot, int steps, int ring) {
    return slot + steps >= ring ? slot + steps - ring : slot + steps;
}
