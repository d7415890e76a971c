// The common part of all kernels: vectors of elements, the ones that a thread visits, and sums over threads and blocks.
//
// x is [outer, channels, inner]. WIDTH contiguous elements make a vector, which one instruction loads. They
// belong to LANES channels: WIDTH of them with channels last, one with channels first. A column is the LANES channels
// that a thread works on, and a position one of the column's vectors. A block has `columns` columns and, for each,
// `rows` threads. blockIdx.x chooses the columns, their tile; the gridDim.y blocks of a tile, its splits, share the
// positions. All block dimensions and numbers of columns are powers of two.

__device__ __forceinline__ float inverse_square_root(float value) { return rsqrtf(value); }

__device__ __forceinline__ double inverse_square_root(double value) { return rsqrt(value); }

__device__ __forceinline__ float without_fraction(float value) {
    return __uint_as_float(__float_as_uint(value) & 0x7f800000u);
}

__device__ __forceinline__ double without_fraction(double value) {
    return __longlong_as_double(__double_as_longlong(value) & 0x7ff0000000000000ll);
}

// The largest power of two that is not above a positive number; 1 for 0, infinity and NaN.
template <typename U>
__device__ __forceinline__ U power_of_two(U value) {
    return value > 0 && value - value == 0 ? without_fraction(value) : U(1);
}

// U, the type of parameters and of all arithmetic.
template <typename T>
struct ParamOf {
    using Type = float;
};

template <>
struct ParamOf<double> {
    using Type = double;
};

template <typename T>
using Param = typename ParamOf<T>::Type;

// Reads per-channel values, from the column's first on.
template <typename U, int LANES>
__device__ __forceinline__ void load_lanes(const U* address, U (&lanes)[LANES]) {
    constexpr int FULL_WIDTH = 16 / sizeof(U);
    constexpr int CHUNK = LANES < FULL_WIDTH ? LANES : FULL_WIDTH;
#pragma unroll
    for (int first = 0; first < LANES; first += CHUNK) {
        Vector<U, CHUNK> chunk;
        chunk.load(address + first);
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) {
            lanes[first + i] = chunk.elements[i];
        }
    }
}

// The order and types of the members are those of `LAYOUT` in launches.py.
struct Layout {
    long long channels;
    long long inner;
    long long positions;  // of a column
    long long row_positions;  // positions of one outer index
    long long row_stride;  // elements from one outer index to the next
    long long step;  // positions from one that a thread visits to its next
    long long step_remainder;  // step modulo row_positions
    long long step_offset;  // elements to the next position when it is in the row that step leads to
    long long wrap_offset;  // elements to add when it is in the row after that
    long long column_bits;  // log2 of columns
};

// The work of this thread.
template <int WIDTH, int LANES>
struct Place {
    int columns;
    int column;  // within the tile
    long long tile;
    long long split;
    long long channel;  // the first one of the column
    bool has_channels;
    long long first;  // position
    int count;  // of the thread's positions

    __device__ __forceinline__ Place(const Layout& layout, long long tile, long long split)
        : columns(1 << layout.column_bits), column(threadIdx.x & (columns - 1)), tile(tile), split(split) {
        const long long rows = blockDim.x >> layout.column_bits;
        channel = (tile * columns + column) * LANES;
        has_channels = channel < layout.channels;
        first = split * rows + (threadIdx.x >> layout.column_bits);
        const bool has_positions = has_channels && first < layout.positions;
        count = has_positions ? static_cast<int>((layout.positions - 1 - first) / layout.step) + 1 : 0;
    }

    // One thread of the column in the block, which holds the column's sums.
    __device__ __forceinline__ bool holds_sums() const { return threadIdx.x < columns; }
};

// Iterates over the thread's positions, forward from the first one or backward from the last one.
template <int WIDTH, int LANES, bool BACKWARD>
struct Walk {
    const Layout& layout;
    long long offset;  // of the vector in the tensor, in elements
    long long inner;  // position within the row
    int remaining;

    __device__ __forceinline__ Walk(const Layout& layout, const Place<WIDTH, LANES>& place)
        : layout(layout), remaining(place.count) {
        const long long start = BACKWARD ? place.first + (place.count - 1) * layout.step : place.first;
        const long long row = start / layout.row_positions;
        inner = start - row * layout.row_positions;
        offset = place.channel * layout.inner + row * layout.row_stride + inner * (WIDTH / LANES);
    }

    __device__ __forceinline__ void advance() {
        if (BACKWARD) {
            inner -= layout.step_remainder;
            offset -= layout.step_offset;
            if (inner < 0) {
                inner += layout.row_positions;
                offset -= layout.wrap_offset;
            }
        } else {
            inner += layout.step_remainder;
            offset += layout.step_offset;
            if (inner >= layout.row_positions) {
                inner -= layout.row_positions;
                offset += layout.wrap_offset;
            }
        }
    }
};

// The dynamic shared memory: a flag, the sums of half the threads, and the kept tensors.
extern __shared__ uint4 shared_memory[];

template <typename U>
__device__ __forceinline__ U* shared_sums() {
    return reinterpret_cast<U*>(shared_memory + 1);
}

template <typename T, int WIDTH, typename Sums>
__device__ __forceinline__ Vector<T, WIDTH>* shared_vectors() {
    const int sums_bytes = (blockDim.x / 2) * Sums::SIZE * static_cast<int>(sizeof(Param<T>));
    return reinterpret_cast<Vector<T, WIDTH>*>(shared_memory + 1 + (sums_bytes + 15) / 16);
}

// Adds up over the threads of each column, always in the same order; the thread that holds_sums has the result.
template <typename Sums>
__device__ __forceinline__ void reduce_block(Sums& sums, int columns) {
    auto* shared = shared_sums<typename Sums::Value>();
    const int stride = blockDim.x / 2;
    for (int half = stride; half >= columns; half /= 2) {
        const int thread = threadIdx.x;
        if (thread >= half && thread < 2 * half) {
#pragma unroll
            for (int i = 0; i < Sums::SIZE; ++i) {
                shared[i * stride + thread - half] = sums.values[i];
            }
        }
        __syncthreads();
        if (thread < half) {
            Sums other;
#pragma unroll
            for (int i = 0; i < Sums::SIZE; ++i) {
                other.values[i] = shared[i * stride + thread];
            }
            sums.merge(other);
        }
        __syncthreads();
    }
}

// Adds up over the blocks of a tile. The last block to get here adds the sums of all, always in the order of the
// splits, so that the result is always the same. Returns true in the block that has the result, in the threads that
// hold_sums.
template <typename Sums, int WIDTH, int LANES>
__device__ __forceinline__ bool reduce_tile(
    Sums& sums, const Place<WIDTH, LANES>& place, typename Sums::Value* partial_sums, unsigned int* tickets) {
    reduce_block(sums, place.columns);
    const long long splits = gridDim.y;
    if (splits == 1) {
        return true;
    }
    const long long split_size = static_cast<long long>(Sums::SIZE) * place.columns;
    typename Sums::Value* of_column = partial_sums + place.tile * splits * split_size + place.column;
    if (place.holds_sums()) {
#pragma unroll
        for (int i = 0; i < Sums::SIZE; ++i) {
            of_column[place.split * split_size + i * place.columns] = sums.values[i];
        }
        __threadfence();
    }
    __syncthreads();
    auto* is_last = reinterpret_cast<unsigned int*>(shared_memory);
    if (threadIdx.x == 0) {
        *is_last = atomicAdd(tickets + place.tile, 1u) + 1 == splits;
        if (*is_last) {
            tickets[place.tile] = 0;
        }
        __threadfence();
    }
    __syncthreads();
    if (!*is_last) {
        return false;
    }
    const int rows = blockDim.x / place.columns;
    sums = Sums();
#pragma unroll (Sums::SIZE > 9 ? 1 : 4)
    for (long long split = threadIdx.x / place.columns; split < splits; split += rows) {
        Sums other;
#pragma unroll
        for (int i = 0; i < Sums::SIZE; ++i) {
            other.values[i] = __ldcg(of_column + split * split_size + i * place.columns);
        }
        sums.merge(other);
    }
    reduce_block(sums, place.columns);
    return true;
}

// Copies the sums from the thread that holds_sums to all threads of the column.
template <typename Sums>
__device__ __forceinline__ void broadcast(Sums& sums, int columns) {
    auto* shared = shared_sums<typename Sums::Value>();
    if (threadIdx.x < columns) {
#pragma unroll
        for (int i = 0; i < Sums::SIZE; ++i) {
            shared[i * columns + threadIdx.x] = sums.values[i];
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Sums::SIZE; ++i) {
        sums.values[i] = shared[i * columns + (threadIdx.x & (columns - 1))];
    }
}
