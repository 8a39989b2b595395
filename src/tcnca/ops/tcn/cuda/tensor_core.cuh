// Shared by the tensor-core kernels: which times a tile covers, and where it is in shared memory.
//
// A tile is 16 chains t = phase + dilation · n of 8 · PARTS channels, processed in blocks of 8 steps. Where there are
// fewer than 16 phases, a chain is cut into segments of `steps`, and the 16 are (segment, phase) pairs. A part of a row,
// 8 channels or 16 bytes, belongs to one warp, or half of it to each of two. For one channel a block is a matrix of 16 chains by 8 times, of which a lane holds the
// times 2q and 2q + 1 of chains g and g + 8 (g = lane / 4, q = lane % 4): the tensor cores read the left operand and
// return the result in this layout. The convolution is that matrix, and those of the blocks around it, times 8 × 8
// Toeplitz matrices: `tap` says which tap belongs where.

#define CHAINS 16
#define SPAN 8
#define PART 8
#define THREADS (32 * WARPS)
#define ROW_BYTES (16 * PARTS)
#define STEPS_AT_ONCE (THREADS / (PARTS * CHAINS))  // that the threads of a block move
#define BLOCK_BYTES (CHAINS * SPAN * ROW_BYTES)

// Output block o needs the input blocks from o - BEFORE to o + AFTER.
constexpr int AFTER = (AHEAD + SPAN - 1) / SPAN;
constexpr int BEFORE = (K - 1 - AHEAD + SPAN - 1) / SPAN;
constexpr int BLOCKS = AFTER + BEFORE + 1;

// Offset of the 16 bytes of a part for step k of chain r, swizzled so that accesses have as few bank conflicts as
// possible: none to 16 bytes, two of each kind to 8 bytes.
__device__ __forceinline__ int swizzle(int k, int r) { return PARTS == 8 ? (k ^ r) & 7 : k >> 1 & 3; }

__device__ __forceinline__ int place(int k, int r, int part) {
    return (k * CHAINS + r) * ROW_BYTES + (part ^ swizzle(k, r)) * 16;
}

// place(k + more, r + 8 * half, part), given `base` = place(k, r, part); `more` may only set bits that k does not have.
__device__ __forceinline__ int place_offset(int base, int more, int half) {
    return (base ^ swizzle(more, 0) * 16) + (more * CHAINS + 8 * half) * ROW_BYTES;
}

// How the time axis of one convolution is cut into tiles. Dilations are limited to the length of the sequence, so all
// of these fit 32 bits, whose division is much faster than that of 64.
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

// The segments that a tile's chains belong to, and the blocks of steps in the longest of them.
struct Extent {
    int first, last, blocks;
};

__device__ __forceinline__ Extent extent_of(const Cut& cut, long long time, int tile_in_row) {
    Extent extent;
    const word item = tile_in_row * CHAINS;
    extent.first = static_cast<int>(item / cut.dilation);
    extent.last = static_cast<int>((item + CHAINS - 1) / cut.dilation);
    const int steps = static_cast<int>(cut.steps);
    // The first phase has the longest chain.
    const int chain = extent.first == extent.last
                          ? steps_before(time, static_cast<int>(item - extent.first * cut.dilation), cut.dilation)
                          : static_cast<int>(cut.chain);
    const int left = chain - extent.first * steps;
    extent.blocks = left <= 0 ? 0 : ((left < steps ? left : steps) + SPAN - 1) / SPAN;
    return extent;
}

// The dropout draws of a lane: `index` belongs to the first block's step 2q of chain g, and of chain g + 8.
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

// One thread's part of copies between device and shared memory: 16 bytes of every second or fourth step of one chain.
struct Mover {
    int begin;  // the first one's step in the chain, in block 0 of the tile
    int limit;  // steps in the chain
    int phase;
    int channel;  // in the tile
};

// Offset of the thread's first 16 bytes in a block.
__device__ __forceinline__ int base_of_mover() {
    return place(threadIdx.x / (PARTS * CHAINS), threadIdx.x / PARTS % CHAINS, threadIdx.x % PARTS);
}

__device__ __forceinline__ Mover mover_for(const Cut& cut, long long time, int tile_in_row, long long left) {
    Mover mover;
    const int part = threadIdx.x % PARTS, chain = threadIdx.x / PARTS % CHAINS, step = threadIdx.x / (PARTS * CHAINS);
    const word item = tile_in_row * CHAINS + chain, segment = item / cut.dilation;
    mover.phase = static_cast<int>(item - segment * cut.dilation);
    mover.begin = static_cast<int>(segment * cut.steps) + step;
    mover.channel = part * PART;
    mover.limit = segment < cut.segments && mover.channel < left ? steps_before(time, mover.phase, cut.dilation) : 0;
    return mover;
}

// Offset at which a mover starts in block `index`, in a tensor with `stride` between two times.
__device__ __forceinline__ long long offset_of(const Mover& mover, const Cut& cut, long long stride, int index) {
    const long long step = mover.begin + index * SPAN;
    return mover.channel + (mover.phase + step * cut.dilation) * stride;
}

// Start to load the block whose first step for this mover is n, at `source`. Steps outside 0 to `limit` are zeros;
// their addresses are invalid and not read.
__device__ __forceinline__ void load_block(char* block, const number* source, long long hop, int base, int n,
                                           int limit) {
#pragma unroll
    for (int i = 0; i < SPAN; i += STEPS_AT_ONCE)
        copy_async(block + place_offset(base, i, 0), source + i * hop,
                   static_cast<word>(n + i) < static_cast<word>(limit));
}

// Store a block; zeros from step `length` on.
__device__ __forceinline__ void store_block(const char* block, number* target, long long hop, int base, int n,
                                            int limit, int length) {
#pragma unroll
    for (int i = 0; i < SPAN; i += STEPS_AT_ONCE) {
        Bytes16 v = load16(block + place_offset(base, i, 0));
#pragma unroll
        for (int j = 0; j < 4; ++j) v.part[j] = LENGTHS && n + i >= length ? 0 : v.part[j];
        if (n + i < limit) store_global(target + i * hop, v);
    }
}

// Read a lane's part of a block: of each channel the times 2q and 2q + 1 of chains g and g + 8.
__device__ __forceinline__ void read_block(word (&matrix)[PART][2], const char* block, int mine) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const Bytes16 even = load16(block + place_offset(mine, 0, h));
        const Bytes16 odd = load16(block + place_offset(mine, 1, h));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            matrix[2 * j][h] = low_halves(even.part[j], odd.part[j]);
            matrix[2 * j + 1][h] = high_halves(even.part[j], odd.part[j]);
        }
    }
}

// Move the matrices by one slot, oldest last, to free slot 0 for the newest.
__device__ __forceinline__ void shift_matrices(word (&matrices)[BLOCKS][PART][2]) {
#pragma unroll
    for (int i = 1; i < BLOCKS; ++i)
#pragma unroll
        for (int c = 0; c < PART; ++c)
#pragma unroll
            for (int h = 0; h < 2; ++h) matrices[i][c][h] = matrices[(i + 1) % BLOCKS][c][h];
}

// sum += matrix(i) · table[i], where matrix(i) is the i-th newest, and rest · table[BLOCKS] if the table has that row.
// One instruction takes two matrices.
template <int SIZE>
__device__ __forceinline__ void convolve(float (&sum)[4], const word (&matrices)[BLOCKS][PART][2],
                                         const word (&rest)[PART][2], const word (&table)[SIZE][PART], int own) {
#pragma unroll
    for (int i = 0; i < SIZE; i += 2) {
        const word(&a)[2] = i < BLOCKS ? matrices[(2 * BLOCKS - i) % BLOCKS][own] : rest[own];
        const word(&b)[2] = i + 1 < BLOCKS ? matrices[(2 * BLOCKS - i - 1) % BLOCKS][own] : rest[own];
        if (i + 1 < SIZE) multiply16(sum, a[0], a[1], b[0], b[1], table[i][own], table[(i + 1) % SIZE][own]);
        else multiply8(sum, a[0], a[1], table[i][own]);
    }
}

// The biases of the warp's channels stay in shared memory, where they occupy no registers.
__device__ __forceinline__ void write_bias(char* to, const float* bias, long long channel, long long channels) {
    const int lane = threadIdx.x % 32;
    if (BIAS && lane < PART)
        reinterpret_cast<float*>(to)[lane] = channel + lane < channels ? bias[channel + lane] : 0.0f;
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
