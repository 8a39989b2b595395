// The non-linearities and their derivatives, and dropout. ACTIVATION: 0 none, 1 silu, 2 gelu, 3 gelu_tanh, 4 relu.

#if DTYPE == 1
// Its error, 2^-11, is far below the rounding of the result.
__device__ __forceinline__ float tanh_of(float x) { return tanh_near(x); }
__device__ __forceinline__ float sigmoid(float x) { return fmaf(0.5f, tanh_near(0.5f * x), 0.5f); }
#else
__device__ __forceinline__ float sigmoid(float x) { return reciprocal(1.0f + exp2_near(-1.4426950408889634f * x)); }
__device__ __forceinline__ float tanh_of(float x) { return fmaf(2.0f, sigmoid(2.0f * x), -1.0f); }
#endif

__device__ __forceinline__ float activate(float z) {
#if ACTIVATION == 1 && DTYPE == 1
    float half = 0.5f * z;
    return fmaf(half, tanh_near(half), half);
#elif ACTIVATION == 1
    return z * sigmoid(z);
#elif ACTIVATION == 2
    return 0.5f * z * (1.0f + erff(0.7071067811865476f * z));
#elif ACTIVATION == 3
    return 0.5f * z * (1.0f + tanh_of(0.7978845608028654f * fmaf(0.044715f * z * z, z, z)));
#elif ACTIVATION == 4
    return fmaxf(z, 0.0f);
#else
    return z;
#endif
}

__device__ __forceinline__ float slope(float z) {
#if ACTIVATION == 1
    float s = sigmoid(z);
    return fmaf(s, fmaf(-z, s, z), s);
#elif ACTIVATION == 2
    float density = 0.3989422804014327f * exp2_near(-0.7213475204444817f * z * z);
    return fmaf(z, density, 0.5f * (1.0f + erff(0.7071067811865476f * z)));
#elif ACTIVATION == 3
    float t = tanh_of(0.7978845608028654f * fmaf(0.044715f * z * z, z, z));
    float inner = 0.7978845608028654f * fmaf(0.134145f * z, z, 1.0f);
    return 0.5f * fmaf(z * inner, fmaf(-t, t, 1.0f), 1.0f + t);
#elif ACTIVATION == 4
    return z > 0.0f ? 1.0f : 0.0f;
#else
    return 1.0f;
#endif
}

// `scale` times the same from OF_Z · z. Half of z costs nothing: halving taps and bias is exact in a type with
// exponents to spare.
#if ACTIVATION == 1 && DTYPE == 1
#define OF_Z 0.5f
__device__ __forceinline__ float activate_of(float half, float scale) {
    const float scaled = half * scale;
    return fmaf(scaled, tanh_near(half), scaled);
}
__device__ __forceinline__ float slope_of(float half, float scale) {
    const float t = tanh_near(half), s = fmaf(0.5f * scale, t, 0.5f * scale);
    return fmaf(s, fmaf(-half, t, half), s);
}
#else
#define OF_Z 1.0f
__device__ __forceinline__ float activate_of(float z, float scale) { return activate(z) * scale; }
__device__ __forceinline__ float slope_of(float z, float scale) { return slope(z) * scale; }
#endif

// Every bit of the result depends on every bit of x.
__device__ __forceinline__ word mixed(word x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

// Random numbers from a counter: what is dropped forwards is dropped again backwards, by whatever kernel. One draw
// serves four neighboring channels at one time with 16 bits each, lower halves first. `fours` is how many a time has;
// `dropped` is compared with the upper half of a word.
struct Dropout {
    word first_key, second_key, dropped, fours;
    float scale;
};

struct Draw {
    word pair[2];
};

__device__ __forceinline__ Dropout dropout_of(const long long* seed, long long layer, long long row, long long channels,
                                              long long dropped, double scale) {
    Dropout dropout;
#if DROPOUT
    const word low = static_cast<word>(*seed), high = static_cast<word>(*seed >> 32);
    const word place = mixed(static_cast<word>(layer) * 0x9e3779b9u + mixed(static_cast<word>(row) + 0x85ebca6bu));
    dropout.first_key = mixed(low ^ place);
    dropout.second_key = mixed(high + mixed(dropout.first_key ^ 0xc2b2ae35u));
#endif
    // Where all are dropped this is nothing, and `scale` drops them.
    dropout.dropped = static_cast<word>(dropped) << 16;
    dropout.fours = static_cast<word>((channels + 3) / 4);
    dropout.scale = static_cast<float>(scale);
    return dropout;
}

__device__ __forceinline__ word first_pair(const Dropout& dropout, word index) {
    word x = index + dropout.first_key;
    x = (x ^ x >> 16) * 0x7feb352du + dropout.second_key;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

#define NEXT_PAIR 0x9e3779b1u

__device__ __forceinline__ Draw draw(const Dropout& dropout, word index) {
    Draw drawn;
    drawn.pair[0] = first_pair(dropout, index);
    const word x = drawn.pair[0] * NEXT_PAIR;
    drawn.pair[1] = x ^ x >> 16;
    return drawn;
}

__device__ __forceinline__ Draw draw_at(const Dropout& dropout, long long time, long long channel) {
    return draw(dropout, static_cast<word>(time) * dropout.fours + static_cast<word>(channel / 4));
}

// Whether the value of a channel stays, given the draw that it is in.
__device__ __forceinline__ bool stays(const Dropout& dropout, const Draw& drawn, int channel) {
    const word pair = channel & 2 ? drawn.pair[1] : drawn.pair[0];
    return (channel & 1 ? pair : pair << 16) >= dropout.dropped;
}
