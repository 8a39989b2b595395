// The gradients of kernels and bias: a partial sum for all tiles that a block of the grid walks, and the sum of these in
// an order that never changes.

#define PAIRS ((BLOCKS + BIAS + 1) / 2)

static_assert(K + BIAS <= 32, "a lane for each number");

// Add the matrices of products (step of x, step of dz) along their diagonals: one number a tap, and one for the bias.
__device__ __forceinline__ void write_partial(char* scratch, const float (&products)[PAIRS][PART][4], float* partial,
                                              long long channel, long long channels) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    float* square = reinterpret_cast<float*>(scratch);
    int from[SPAN];
#pragma unroll
    for (int n = 0; n < SPAN; ++n) {
        // The step of x that this lane's tap carries to step n.
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
            partial[(channel + c) * (K + BIAS) + lane] = sum;
        }
        __syncwarp();
    }
}

// Add the parts of every layer.
template <class Job>
__device__ __forceinline__ void add_up(char* shared, const Job& job) {
    float* sums = reinterpret_cast<float*>(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const long long width = job.channels * (K + BIAS), strips = (width + 31) / 32;
    const float* partial = job.partial;
    long long dilation = job.dilation;
    for (int layer = 0; layer < job.depth; ++layer) {
        const Cut cut = cut_time(job.time, dilation, job.steps[layer]);
        const int parts = min(static_cast<int>(cut.tiles_in_row * job.rows), static_cast<int>(gridDim.x));
        // Layers start at different blocks, so that all of the grid has something to add.
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
                const long long channel = column / (K + BIAS);
                const int j = static_cast<int>(column % (K + BIAS));
                if (j < K) job.dweight[(layer * job.channels + channel) * K + j] = sum;
                else job.dbias[layer * job.channels + channel] = sum;
            }
            __syncthreads();
        }
        partial += parts * width;
        dilation = min(dilation * job.factor, job.time);
    }
}
