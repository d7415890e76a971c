// Arithmetic in PTX: whatever the compiler's options are, each result is rounded by itself, and none is flushed to zero.

__device__ __forceinline__ float product(float x, float y) {
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    return result;
}

__device__ __forceinline__ float sum(float x, float y) {
    float result;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    return result;
}

__device__ __forceinline__ float quotient(float x, float y) {
    float result;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    return result;
}

__device__ __forceinline__ double product(double x, double y) {
    double result;
    asm("mul.rn.f64 %0, %1, %2;" : "=d"(result) : "d"(x), "d"(y));
    return result;
}

__device__ __forceinline__ double sum(double x, double y) {
    double result;
    asm("add.rn.f64 %0, %1, %2;" : "=d"(result) : "d"(x), "d"(y));
    return result;
}

__device__ __forceinline__ double quotient(double x, double y) {
    double result;
    asm("div.rn.f64 %0, %1, %2;" : "=d"(result) : "d"(x), "d"(y));
    return result;
}

__device__ __forceinline__ double as_double(float value) {
    double result;
    asm("cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(value));
    return result;
}

__device__ __forceinline__ float as_float(double value) {
    float result;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(result) : "d"(value));
    return result;
}
