// The non-linearities and their derivatives. ACTIVATION: 0 none, 1 silu, 2 gelu, 3 gelu_tanh, 4 relu.

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
