// Element-wise arithmetic on lists of arrays, all of them in one launch.
//
// A table has a row of words for each array of the results: its first tile, the number of its elements, and the
// addresses of the result, of the sum, and of the sources. Arrays are cut into tiles of equal size, and each block takes
// consecutive ones. A thread has VECTORS vectors on their way at a time.

struct CombineArguments {
    const long long* table;  // null: `rows`
    long long num_rows;
    long long num_tiles;
    long long tiles_per_block;
    long long num_sources;
    long long has_sum;
    long long divides;
    double divisor;
    double factors[MAX_SOURCES];
    long long rows[INLINE_WORDS];
};

struct CheckArguments {
    const long long* table;  // null: `rows`
    unsigned long long* found;
    long long num_rows;
    long long num_tiles;
    long long tiles_per_block;
    long long rows[INLINE_WORDS];
};

template <typename X, typename Y>
constexpr int width_of() {
    return 16 / (sizeof(X) > sizeof(Y) ? sizeof(X) : sizeof(Y));
}

template <typename X, typename Y>
constexpr long long tile_of() {
    return static_cast<long long>(THREADS) * VECTORS * width_of<X, Y>();
}

// The tiles of a block, and the rows to which they belong.
struct Tiles {
    const long long* table;
    long long num_rows;
    long long words;
    long long tile;
    long long end;
    long long row;

    __device__ __forceinline__ Tiles(
        const long long* rows, long long count, long long row_words, long long num_tiles, long long per_block)
        : table(rows), num_rows(count), words(row_words), tile(blockIdx.x * per_block), end(tile + per_block), row(0) {
        end = end < num_tiles ? end : num_tiles;
        // The last row that begins no later.
        long long after = num_rows;
        while (row + 1 < after) {
            const long long middle = (row + after) / 2;
            if (first_tile(middle) <= tile) {
                row = middle;
            } else {
                after = middle;
            }
        }
    }

    __device__ __forceinline__ long long first_tile(long long of) const { return table[of * words]; }

    __device__ __forceinline__ const long long* words_of_row() const { return table + row * words; }

    __device__ __forceinline__ void next() {
        ++tile;
        while (row + 1 < num_rows && first_tile(row + 1) <= tile) {
            ++row;
        }
    }
};

template <typename T, int WIDTH>
__device__ __forceinline__ void load(const T* address, Vector<T, WIDTH>& loaded) {
    if (reinterpret_cast<unsigned long long>(address) % sizeof loaded == 0) {
        loaded.load(address);
    } else {
        for (int i = 0; i < WIDTH; ++i) {
            loaded.elements[i] = address[i];
        }
    }
}

// The elements of a tile: some before the first vector, vectors, and some after the last one.
struct Extent {
    long long begin;
    long long body;
    long long num_vectors;
    long long tail;
    long long end;

    // Vectors are aligned in an array, whose elements have this size.
    __device__ __forceinline__ Extent(
        long long tile, long long tile_size, long long size, long long address, int element_bytes, int width) {
        const long long bytes = static_cast<long long>(element_bytes) * width;
        const long long head = (bytes - address % bytes) % bytes / element_bytes;
        begin = tile == 0 ? 0 : head + tile * tile_size;
        end = head + (tile + 1) * tile_size;
        end = end < size ? end : size;
        body = tile == 0 ? (head < size ? head : size) : begin;
        num_vectors = body < end ? (end - body) / width : 0;
        tail = body + num_vectors * width;
    }
};

// Computes (sum + first source * its factor + second source * its factor + ...) / divisor, in the arithmetic of S and
// rounded to S after each step; without a sum or a divisor, or without sources. The results are rounded to O.
template <typename G, typename S, typename O>
struct Combination {
    using A = typename ArithmeticOf<S>::Type;

    const CombineArguments& arguments;
    const S* sum_address;
    const long long* sources;
    A divisor;

    __device__ __forceinline__ A scaled(G element, int source) const {
        A factor;
        round_to(arguments.factors[source], factor);
        return rounded<S>(product(As<A>::number(element), factor));
    }

    __device__ __forceinline__ O end(A value) const {
        const A result = arguments.divides ? rounded<S>(quotient(value, divisor)) : value;
        O element;
        round_to(result, element);
        return element;
    }

    __device__ __forceinline__ O one(long long index) const {
        A value = 0;
        if (arguments.has_sum) {
            value = As<A>::number(sum_address[index]);
        }
        for (int source = 0; source < arguments.num_sources; ++source) {
            const A added = scaled(reinterpret_cast<const G*>(sources[source])[index], source);
            value = source == 0 && !arguments.has_sum ? added : rounded<S>(sum(value, added));
        }
        return end(value);
    }

    // Vectors at `index`, `index` + `step`, ... before `limit`.
    template <int WIDTH>
    __device__ __forceinline__ void vectors(O* out, long long index, long long step, long long limit) const {
        A values[VECTORS][WIDTH] = {};
        if (arguments.has_sum) {
            Vector<S, WIDTH> sums[VECTORS];
            for (int i = 0; i < VECTORS; ++i) {
                if (index + i * step < limit) {
                    load(sum_address + index + i * step, sums[i]);
                }
            }
            for (int i = 0; i < VECTORS; ++i) {
                if (index + i * step < limit) {
                    for (int j = 0; j < WIDTH; ++j) {
                        values[i][j] = As<A>::number(sums[i].elements[j]);
                    }
                }
            }
        }
        for (int source = 0; source < arguments.num_sources; ++source) {
            const G* address = reinterpret_cast<const G*>(sources[source]);
            Vector<G, WIDTH> loaded[VECTORS];
            for (int i = 0; i < VECTORS; ++i) {
                if (index + i * step < limit) {
                    load(address + index + i * step, loaded[i]);
                }
            }
            for (int i = 0; i < VECTORS; ++i) {
                if (index + i * step < limit) {
                    for (int j = 0; j < WIDTH; ++j) {
                        const A added = scaled(loaded[i].elements[j], source);
                        const bool begins = source == 0 && !arguments.has_sum;
                        values[i][j] = begins ? added : rounded<S>(sum(values[i][j], added));
                    }
                }
            }
        }
        for (int i = 0; i < VECTORS; ++i) {
            if (index + i * step < limit) {
                Vector<O, WIDTH> results;
                for (int j = 0; j < WIDTH; ++j) {
                    results.elements[j] = end(values[i][j]);
                }
                results.store_cached(out + index + i * step);
            }
        }
    }
};

template <typename G, typename S, typename O>
__device__ __forceinline__ void combine(const CombineArguments& arguments) {
    using A = typename ArithmeticOf<S>::Type;
    constexpr int WIDTH = width_of<G, S>();
    const long long* table = arguments.table != nullptr ? arguments.table : arguments.rows;
    const long long words = ROW_WORDS + arguments.num_sources;
    A divisor;
    round_to(arguments.divisor, divisor);
    for (Tiles tiles(table, arguments.num_rows, words, arguments.num_tiles, arguments.tiles_per_block);
         tiles.tile < tiles.end; tiles.next()) {
        const long long* row = tiles.words_of_row();
        const Extent extent(tiles.tile - row[0], tile_of<G, S>(), row[1], row[2], sizeof(O), WIDTH);
        O* out = reinterpret_cast<O*>(row[2]);
        const Combination<G, S, O> combination{arguments, reinterpret_cast<const S*>(row[3]), row + ROW_WORDS, divisor};
        if (extent.begin + threadIdx.x < extent.body) {
            out[extent.begin + threadIdx.x] = combination.one(extent.begin + threadIdx.x);
        }
        combination.template vectors<WIDTH>(
            out, extent.body + static_cast<long long>(threadIdx.x) * WIDTH, THREADS * WIDTH, extent.tail);
        if (extent.tail + threadIdx.x < extent.end) {
            out[extent.tail + threadIdx.x] = combination.one(extent.tail + threadIdx.x);
        }
    }
}

// Notes the place of an element that is looked for; the first one of all is the least.
__device__ __forceinline__ void note(unsigned long long* found, long long row, long long position) {
    const unsigned long long place = static_cast<unsigned long long>(row) << POSITION_BITS | position;
    if (place < *found) {
        atomicMin(found, place);
    }
}

// Finds the first source that is infinite or NaN; a row is one of a sum without sources, whose sum is looked at.
template <typename T>
__device__ __forceinline__ void find_non_finite(const CheckArguments& arguments) {
    constexpr int WIDTH = width_of<T, T>();
    const long long* table = arguments.table != nullptr ? arguments.table : arguments.rows;
    for (Tiles tiles(table, arguments.num_rows, ROW_WORDS, arguments.num_tiles, arguments.tiles_per_block);
         tiles.tile < tiles.end; tiles.next()) {
        const long long* row = tiles.words_of_row();
        const Extent extent(tiles.tile - row[0], tile_of<T, T>(), row[1], row[3], sizeof(T), WIDTH);
        const T* values = reinterpret_cast<const T*>(row[3]);
        const long long thread = threadIdx.x;
        if (extent.begin + thread < extent.body && !is_finite(values[extent.begin + thread])) {
            note(arguments.found, tiles.row, extent.begin + thread);
        }
        const long long first = extent.body + thread * WIDTH;
        Vector<T, WIDTH> loaded[VECTORS];
        for (int i = 0; i < VECTORS; ++i) {
            if (first + i * THREADS * WIDTH < extent.tail) {
                loaded[i].load(values + first + i * THREADS * WIDTH);
            }
        }
        for (int i = 0; i < VECTORS; ++i) {
            if (first + i * THREADS * WIDTH < extent.tail) {
                for (int j = 0; j < WIDTH; ++j) {
                    if (!is_finite(loaded[i].elements[j])) {
                        note(arguments.found, tiles.row, first + i * THREADS * WIDTH + j);
                        break;
                    }
                }
            }
        }
        if (extent.tail + thread < extent.end && !is_finite(values[extent.tail + thread])) {
            note(arguments.found, tiles.row, extent.tail + thread);
        }
    }
}

// Rounds elements to another type, and finds the first finite one that becomes infinite.
template <typename From, typename To>
__device__ __forceinline__ void convert(const CheckArguments& arguments) {
    using A = typename ArithmeticOf<From>::Type;
    const long long* table = arguments.table != nullptr ? arguments.table : arguments.rows;
    constexpr long long TILE = tile_of<From, To>();
    for (Tiles tiles(table, arguments.num_rows, ROW_WORDS, arguments.num_tiles, arguments.tiles_per_block);
         tiles.tile < tiles.end; tiles.next()) {
        const long long* row = tiles.words_of_row();
        const long long begin = (tiles.tile - row[0]) * TILE;
        const long long end = begin + TILE < row[1] ? begin + TILE : row[1];
        To* out = reinterpret_cast<To*>(row[2]);
        const From* source = reinterpret_cast<const From*>(row[3]);
        for (long long index = begin + threadIdx.x; index < end; index += THREADS) {
            const From element = source[index];
            To converted;
            round_to(As<A>::number(element), converted);
            out[index] = converted;
            if (!is_finite(converted) && is_finite(element)) {
                note(arguments.found, tiles.row, index);
            }
        }
    }
}
