// What the gradients of the layers read, tile after tile, and how it comes to shared memory.

#define X_RING (DEEP + 1)
#define DY_RING (DEEP + BEFORE + 1)

struct Job {
    const number* x;
    const number* inner;
    const float* weight;
    const float* bias;
    const number* dy;
    number* dx;
    number* flow;
    const long long* lengths;
    const long long* seed;
    float* partial;
    float* dweight;
    float* dbias;
    word* counter;
    long long rows, time, channels, x_time, x_batch, dy_time, dy_batch, dilation, factor, depth, dropped;
    double scale;
    long long steps[LAYERS];
};

struct Layer {
    int number_of;
    Cut cut;
    int tiles_in_group, tiles;
    const number* x;
    const number* dy;
    number* dx;
    const float* weight;
    const float* bias;
    float* partial;
    long long x_time, x_batch, dy_time, dy_batch;
    long long x_hop, dy_hop, dx_hop;  // between two steps of a chain
};

static_assert(sizeof(Layer) <= LAYER_BYTES, "room for what is known of a layer");

__device__ __forceinline__ Layer layer_of(const Job& job, int number_of) {
    Layer layer;
    layer.number_of = number_of;
    // The parts of the layers before this one come first.
    layer.partial = job.partial;
    long long dilation = job.dilation;
    for (int i = 0;; ++i) {
        layer.cut = cut_time(job.time, dilation, job.steps[i]);
        layer.tiles_in_group = static_cast<int>(layer.cut.tiles_in_row * job.rows);
        if (i == number_of) break;
        layer.partial += min(layer.tiles_in_group, static_cast<int>(gridDim.x)) * job.channels * (K + BIAS);
        dilation = min(dilation * job.factor, job.time);
    }
    layer.tiles = layer.tiles_in_group * static_cast<int>((job.channels + PART * WARPS - 1) / (PART * WARPS));
    const bool top = number_of + 1 == job.depth, bottom = number_of == 0;
    const long long packed = job.time * job.channels, tensor = job.rows * packed;
    layer.x = bottom ? job.x : job.inner + (number_of - 1) * tensor;
    layer.x_time = bottom ? job.x_time : job.channels;
    layer.x_batch = bottom ? job.x_batch : packed;
    layer.dy = top ? job.dy : number_of % 2 ? job.dx : job.flow;
    layer.dy_time = top ? job.dy_time : job.channels;
    layer.dy_batch = top ? job.dy_batch : packed;
    layer.dx = number_of % 2 ? job.flow : job.dx;
    layer.x_hop = layer.cut.dilation * layer.x_time;
    layer.dy_hop = layer.cut.dilation * layer.dy_time;
    layer.dx_hop = layer.cut.dilation * job.channels;
    layer.weight = job.weight + number_of * job.channels * K;
    layer.bias = job.bias + number_of * job.channels;
    return layer;
}

// One tile: where its blocks lie, and which of them there are. Block s of x comes with block s - AFTER of dy.
struct Tile {
    int index, group, in_row;
    long long row;
    int start, end, blocks, flowing;
    Mover mover;
    int length;
};

__device__ __forceinline__ Tile tile_of(const Layer& layer, const Job& job, int index) {
    Tile tile;
    tile.index = index;
    tile.group = index / layer.tiles_in_group;
    const int in_group = index - tile.group * layer.tiles_in_group;
    const int tiles_in_row = static_cast<int>(layer.cut.tiles_in_row);
    tile.row = in_group / tiles_in_row;
    tile.in_row = in_group % tiles_in_row;
    const Extent extent = extent_of(layer.cut, job.time, tile.in_row);
    tile.blocks = extent.blocks;
    // Nothing lies before the start of the sequence, and no gradient comes from behind its end.
    tile.start = extent.last == 0 ? 0 : -(BEFORE + AFTER);
    tile.flowing = extent.first + 1 == static_cast<int>(layer.cut.segments) ? tile.blocks : tile.blocks + BEFORE;
    // One with no steps of its own is nothing to walk.
    tile.end = tile.blocks == 0 ? tile.start : tile.blocks + BEFORE + AFTER;
    tile.mover = mover_for(layer.cut, job.time, tile.in_row, job.channels - tile.group * PART * WARPS);
    tile.length = LENGTHS ? min(tile.mover.limit,
                                steps_before(job.lengths[tile.row], tile.mover.phase, layer.cut.dilation))
                          : tile.mover.limit;
    return tile;
}

// Fetches the blocks of all tiles of a layer in the order in which they are walked, DEEP of them ahead: the next tile's
// first blocks are on their way while the last ones of a tile flow out.
struct Feeder {
    int index;  // of the tile
    int s, end, flowing;
    int asked, limit, length;
    const number* source;
    const number* slopes;
};

__device__ __forceinline__ Feeder feeder_for(int index) {
    Feeder feeder;
    feeder.index = index - static_cast<int>(gridDim.x);
    feeder.s = feeder.end = 0;
    return feeder;
}

// The next tile of this block of the grid that has steps.
__device__ __forceinline__ void go_on(Feeder& feeder, const Layer& layer, const Job& job) {
    while (feeder.s == feeder.end && feeder.index < layer.tiles) {
        feeder.index += gridDim.x;
        if (feeder.index >= layer.tiles) break;
        const Tile tile = tile_of(layer, job, feeder.index);
        const long long channel = static_cast<long long>(tile.group) * PART * WARPS;
        feeder.s = tile.start;
        feeder.end = tile.end;
        feeder.flowing = tile.flowing;
        feeder.asked = tile.mover.begin + tile.start * SPAN;
        feeder.limit = tile.mover.limit;
        feeder.length = tile.length;
        feeder.source =
            layer.x + tile.row * layer.x_batch + channel + offset_of(tile.mover, layer.cut, layer.x_time, tile.start);
        feeder.slopes = layer.dy + tile.row * layer.dy_batch + channel +
                        offset_of(tile.mover, layer.cut, layer.dy_time, tile.start - AFTER);
    }
}

// The next blocks of x and dy to these places. `base` is that of every mover of this thread.
__device__ __forceinline__ void feed(Feeder& feeder, char* x_to, char* dy_to, int base, const Layer& layer,
                                     const Job& job) {
    if (feeder.s == feeder.end) go_on(feeder, layer, job);
    if (feeder.s < feeder.end) {
        if (feeder.s - AFTER < feeder.flowing) {
            ask(x_to, feeder.source, layer.x_hop, base, feeder.asked, feeder.length);
            if (feeder.s >= 0)
                ask(dy_to, feeder.slopes, layer.dy_hop, base, feeder.asked - AFTER * SPAN, feeder.limit);
            feeder.source += SPAN * layer.x_hop;
            feeder.slopes += SPAN * layer.dy_hop;
            feeder.asked += SPAN;
        }
        ++feeder.s;
    }
    close_group();
}
