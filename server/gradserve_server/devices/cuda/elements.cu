// Iterates threads over elements, and loads and stores several elements at a time.

template <int BYTES>
struct WordOf;

template <>
struct WordOf<2> {
    using Type = unsigned short;
};

template <>
struct WordOf<4> {
    using Type = unsigned int;
};

template <>
struct WordOf<8> {
    using Type = uint2;
};

template <>
struct WordOf<16> {
    using Type = uint4;
};

// WIDTH contiguous elements, which one instruction loads.
template <typename T, int WIDTH>
struct alignas(sizeof(T) * WIDTH) Vector {
    using Word = typename WordOf<sizeof(T) * WIDTH>::Type;

    T elements[WIDTH];

    __device__ __forceinline__ Word& word() { return *reinterpret_cast<Word*>(elements); }

    __device__ __forceinline__ const Word& word() const { return *reinterpret_cast<const Word*>(elements); }

    __device__ __forceinline__ void load(const T* address) { word() = *reinterpret_cast<const Word*>(address); }

    // Loads what is not used again, so that it need not stay in the cache.
    __device__ __forceinline__ void load_last(const T* address) {
        word() = __ldcs(reinterpret_cast<const Word*>(address));
    }

    // Leaves the cache to inputs that are read again.
    __device__ __forceinline__ void store(T* address) const { __stcs(reinterpret_cast<Word*>(address), word()); }

    // Loads what is read again soon.
    __device__ __forceinline__ void store_cached(T* address) const { *reinterpret_cast<Word*>(address) = word(); }
};

// The elements or vectors that a thread visits: every step-th one from index on.
struct GridStride {
    long long index;
    long long step;

    __device__ __forceinline__ GridStride()
        : index(static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x),
          step(static_cast<long long>(gridDim.x) * blockDim.x) {}
};
