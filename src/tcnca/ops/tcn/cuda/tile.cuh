// What the tensor-core kernels share: which times a tile covers, and how it lies in shared memory.
//
// A tile is 16 chains t = phase + dilation · n of 8 · WARPS channels, walked in blocks of 8 steps. Where there are
// fewer than 16 phases, a chain is cut into segments of `steps`, and the 16 are (segment, phase) pairs. A warp owns 8
// channels, 16 bytes of a row. For one channel a block is a matrix of 16 chains by 8 times, of which a lane holds the
// times 2q and 2q + 1 of chains g and g + 8 (g = lane / 4, q = lane % 4): this is at once how the tensor cores want
// the left operand, and how they return the result. The convolution is that matrix, and those of the blocks around
// it, times 8 × 8 Toeplitz matrices: `tap` says which tap belongs where.
//
// TURNS steps are written out one after the other: as many as there are blocks in registers, which then need not move,
// or one, whose code takes less of the instruction cache.

#define CHAINS 16
#define SPAN 8
#define PART 8
#define THREADS (32 * WARPS)
#define ROW_BYTES (16 * WARPS)
#define BLOCK_BYTES (CHAINS * SPAN * ROW_BYTES)

// Output block o needs the input blocks from o - BEFORE to o + AFTER.
constexpr int AFTER = (AHEAD + SPAN - 1) / SPAN;
constexpr int BEFORE = (K - 1 - AHEAD + SPAN - 1) / SPAN;
constexpr int BLOCKS = AFTER + BEFORE + 1;

typedef unsigned short number;

// Where the 16 bytes of warp `part` for step k of chain r lie: spread so that neither lanes that differ in 2q and g
// nor those that differ in g and 2q meet in a bank.
__device__ __forceinline__ int place(int k, int r, int part) {
    const int turn = WARPS == 8 ? (k ^ r) & 7 : ((k ^ r) >> 1) & (WARPS - 1);
    return (k * CHAINS + r) * ROW_BYTES + (part ^ turn) * 16;
}

// place(k + more, r + 8 * half, part) from `base`, place(k, r, part), where `more` only sets bits that k has not.
__device__ __forceinline__ int beside(int base, int more, int half) {
    const int turn = WARPS == 8 ? more : (more >> 1) & (WARPS - 1);
    return (base ^ turn * 16) + (more * CHAINS + 8 * half) * ROW_BYTES;
}

// How the time axis of one convolution is cut into tiles. A dilation beyond the end of time does what one as long as
// time does, so all of these fit 32 bits, which divide much faster than 64.
struct Cut {
    word dilation, chain, segments, steps, tiles_in_row;
};

__device__ __forceinline__ Cut cut_time(long long time, long long dilation, long long steps) {
    Cut cut;
    cut.dilation = static_cast<word>(dilation < time ? dilation : time);
    cut.chain = (static_cast<word>(time) + cut.dilation - 1) / cut.dilation;
    cut.steps = static_cast<word>(steps);
    cut.segments = (cut.chain + cut.steps - 1) / cut.steps;
    cut.tiles_in_row = (cut.dilation * cut.segments + CHAINS - 1) / CHAINS;
    return cut;
}

__device__ __forceinline__ int steps_before(long long end, int phase, word dilation) {
    return end <= phase ? 0 : static_cast<int>((static_cast<word>(end - phase) + dilation - 1) / dilation);
}

// Which segments a tile's chains belong to, and the blocks of steps that the longest of them has.
struct Extent {
    int first, last, blocks;
};

__device__ __forceinline__ Extent extent_of(const Cut& cut, long long time, int tile_in_row) {
    Extent extent;
    const word item = tile_in_row * CHAINS;
    extent.first = static_cast<int>(item / cut.dilation);
    extent.last = static_cast<int>((item + CHAINS - 1) / cut.dilation);
    const int steps = static_cast<int>(cut.steps);
    // Later phases have no longer chains.
    const int chain = extent.first == extent.last
                          ? steps_before(time, static_cast<int>(item - extent.first * cut.dilation), cut.dilation)
                          : static_cast<int>(cut.chain);
    const int left = chain - extent.first * steps;
    extent.blocks = left <= 0 ? 0 : ((left < steps ? left : steps) + SPAN - 1) / SPAN;
    return extent;
}

// The draws of a lane: `index` is that of the first block's step 2q of chain g, and of chain g + 8.
struct Draws {
    word index[2], hop;
};

__device__ __forceinline__ Draws draws_for(const Cut& cut, const Dropout& dropout, int tile_in_row, long long channel) {
    Draws draws;
    draws.hop = cut.dilation * dropout.fours;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const word item = tile_in_row * CHAINS + threadIdx.x % 32 / 4 + 8 * h, segment = item / cut.dilation;
        const word step = segment * cut.steps + 2 * (threadIdx.x % 4);
        draws.index[h] = (item - segment * cut.dilation + step * cut.dilation) * dropout.fours +
                         static_cast<word>(channel / 4);
    }
    return draws;
}

// One thread's share of moving blocks between device and shared memory: 16 bytes of every other step of one chain.
struct Mover {
    int begin;  // the first one's step in the chain, in block 0 of the tile
    int limit;  // steps in the chain
    int phase;
    int channel;  // of the tile's
};

// Where the first of them lies in a block.
__device__ __forceinline__ int base_of_mover() {
    return place(threadIdx.x / (WARPS * CHAINS), threadIdx.x / WARPS % CHAINS, threadIdx.x % WARPS);
}

__device__ __forceinline__ Mover mover_for(const Cut& cut, long long time, int tile_in_row, long long left) {
    Mover mover;
    const int part = threadIdx.x % WARPS, chain = threadIdx.x / WARPS % CHAINS, step = threadIdx.x / (WARPS * CHAINS);
    const word item = tile_in_row * CHAINS + chain, segment = item / cut.dilation;
    mover.phase = static_cast<int>(item - segment * cut.dilation);
    mover.begin = static_cast<int>(segment * cut.steps) + step;
    mover.channel = part * PART;
    mover.limit = segment < cut.segments && mover.channel < left ? steps_before(time, mover.phase, cut.dilation) : 0;
    return mover;
}

// Where a mover starts in block `index`, in a tensor with `stride` between two times.
__device__ __forceinline__ long long offset_of(const Mover& mover, const Cut& cut, long long stride, int index) {
    const long long step = mover.begin + index * SPAN;
    return mover.channel + (mover.phase + step * cut.dilation) * stride;
}

// Ask for the block whose first step for this mover is n, at `source`; the real steps end before `limit`. Where a
// step is not real its address is nonsense, and is not read.
__device__ __forceinline__ void ask(char* block, const number* source, long long hop, int base, int n, int limit) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
        fetch(block + beside(base, 2 * i, 0), source + 2 * i * hop,
              static_cast<word>(n + 2 * i) < static_cast<word>(limit));
}

// Write a block out; from step `length` on, zeros.
__device__ __forceinline__ void put(const char* block, number* target, long long hop, int base, int n, int limit,
                                    int length) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        Four v = read_four(block + beside(base, 2 * i, 0));
#pragma unroll
        for (int j = 0; j < 4; ++j) v.part[j] = LENGTHS && n + 2 * i >= length ? 0 : v.part[j];
        if (n + 2 * i < limit) write_out(target + 2 * i * hop, v);
    }
}

// A lane's share of a block: of each channel the times 2q and 2q + 1 of chains g and g + 8.
__device__ __forceinline__ void read_block(word (&matrix)[PART][2], const char* block, int mine) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const Four even = read_four(block + beside(mine, 0, h));
        const Four odd = read_four(block + beside(mine, 1, h));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            matrix[2 * j][h] = lows(even.part[j], odd.part[j]);
            matrix[2 * j + 1][h] = highs(even.part[j], odd.part[j]);
        }
    }
}

// Free the slot of the newest matrix, where there is but one for it.
__device__ __forceinline__ void grow_older(word (&matrices)[BLOCKS][PART][2]) {
#pragma unroll
    for (int i = 1; TURNS == 1 && i < BLOCKS; ++i)
#pragma unroll
        for (int c = 0; c < PART; ++c)
#pragma unroll
            for (int h = 0; h < 2; ++h) matrices[i][c][h] = matrices[(i + 1) % BLOCKS][c][h];
}

// sum += matrices[u - i] · table[i], the newest matrix in slot u, and rest · table[BLOCKS] where the table has that.
// Two matrices make one instruction.
template <int SIZE>
__device__ __forceinline__ void convolve(float (&sum)[4], const word (&matrices)[BLOCKS][PART][2],
                                         const word (&rest)[PART][2], const word (&table)[SIZE][PART], int u, int own) {
#pragma unroll
    for (int i = 0; i < SIZE; i += 2) {
        const word(&a)[2] = i < BLOCKS ? matrices[(u - i + 2 * BLOCKS) % BLOCKS][own] : rest[own];
        const word(&b)[2] = i + 1 < BLOCKS ? matrices[(u - i - 1 + 2 * BLOCKS) % BLOCKS][own] : rest[own];
        if (i + 1 < SIZE) multiply16(sum, a[0], a[1], b[0], b[1], table[i][own], table[(i + 1) % SIZE][own]);
        else multiply8(sum, a[0], a[1], table[i][own]);
    }
}

// The biases of the warp's channels wait in shared memory, where they take no registers.
__device__ __forceinline__ void write_bias(char* to, const float* bias, long long channel, long long channels) {
    const int lane = threadIdx.x % 32;
    if (BIAS && lane < PART) reinterpret_cast<float*>(to)[lane] = channel + lane < channels ? bias[channel + lane] : 0.0f;
    __syncwarp();
}

__device__ __forceinline__ float read_bias(const char* from, int own) {
    return BIAS ? reinterpret_cast<const float*>(from)[own] : 0.0f;
}

// The tap that carries step k of input block `o + AFTER - back` to step n of output block o; zero outside the kernel.
__device__ __forceinline__ float tap(const float* kernel, int back, int n, int k) {
    const int j = AHEAD + SPAN * (back - AFTER) + n - k;
    return j >= 0 && j < K ? kernel[j] : 0.0f;
}
