// The gradients of kernels and bias: partial sums a tile, and their sum in an order that never changes.

#define PAIRS ((BLOCKS + BIAS + 1) / 2)

// Add the matrices of products (step of x, step of dz) along their diagonals: one number a tap, and one for the bias.
__device__ __forceinline__ void write_partial(char* scratch, const float (&products)[PAIRS][PART][4], float* partial,
                                              long long channel, long long channels) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    float* square = reinterpret_cast<float*>(scratch);
#pragma unroll
    for (int c = 0; c < PART; ++c) {
#pragma unroll
        for (int p = 0; p < PAIRS; ++p)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float* to = square + ((2 * p + h) * SPAN + g) * SPAN + 2 * q;
                to[0] = products[p][c][2 * h];
                to[1] = products[p][c][2 * h + 1];
            }
        __syncwarp();
        if (channel + c < channels)
            for (int j = lane; j < K + BIAS; j += 32) {
                float sum = 0.0f;
                if (j == K) {
                    for (int n = 0; n < SPAN; ++n) sum += square[BLOCKS * SPAN * SPAN + n];
                } else {
#pragma unroll
                    for (int i = 0; i < BLOCKS; ++i)
#pragma unroll
                        for (int k = 0; k < SPAN; ++k) {
                            const int n = j - AHEAD - SPAN * (i - AFTER) + k;
                            if (n >= 0 && n < SPAN) sum += square[(i * SPAN + k) * SPAN + n];
                        }
                }
                partial[(channel + c) * (K + BIAS) + j] = sum;
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
        const int parts = static_cast<int>(cut.tiles_in_row * job.rows);
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
