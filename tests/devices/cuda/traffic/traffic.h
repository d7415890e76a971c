// Counts what kernels load from global memory and store there. The compiler calls these functions at every access.
//
// What a block loads again comes from its multiprocessor's cache: memory counts once per block, in sectors of 32 bytes.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define UNCOUNTED __attribute__((no_sanitize("coverage")))

namespace traffic {

constexpr int MAX_ARRAYS = 256;
constexpr int SECTOR_BYTES = 32;

struct Array {
    uint64_t begin, end, loaded, stored;
    uint32_t* seen;  // for each sector, the number of the last block that has loaded it
};

static Array arrays[MAX_ARRAYS];
static int num_arrays = 0;
static uint32_t block = 0;

UNCOUNTED inline Array* find(uint64_t place) {
    for (int i = 0; i < num_arrays; ++i) {
        if (arrays[i].begin <= place && place < arrays[i].end) {
            return &arrays[i];
        }
    }
    return nullptr;
}

UNCOUNTED inline void load(const void* address) {
    const uint64_t place = reinterpret_cast<uint64_t>(address);
    if (Array* array = find(place)) {
        uint32_t& seen = array->seen[place / SECTOR_BYTES - array->begin / SECTOR_BYTES];
        array->loaded += seen == block ? 0 : SECTOR_BYTES;
        seen = block;
    }
}

UNCOUNTED inline void store(const void* address, int bytes) {
    if (Array* array = find(reinterpret_cast<uint64_t>(address))) {
        array->stored += bytes;
    }
}

UNCOUNTED inline void next_block() { ++block; }

}  // namespace traffic

#define EMULATED_BLOCK_BEGINS traffic::next_block();

extern "C" {
// Begins to count for arrays of device memory, given their first bytes and their ends; returns whether it can.
UNCOUNTED int watch_traffic(const uint64_t* begins, const uint64_t* ends, int count) {
    if (count > traffic::MAX_ARRAYS) {
        return 0;
    }
    traffic::num_arrays = count;
    traffic::block = 0;
    for (int i = 0; i < count; ++i) {
        const uint64_t sectors = (ends[i] - begins[i]) / traffic::SECTOR_BYTES + 2;
        traffic::arrays[i] = {begins[i], ends[i], 0, 0, static_cast<uint32_t*>(calloc(sectors, sizeof(uint32_t)))};
    }
    return 1;
}

// Returns what was counted, and ends counting.
UNCOUNTED void read_traffic(uint64_t* loaded, uint64_t* stored) {
    for (int i = 0; i < traffic::num_arrays; ++i) {
        loaded[i] = traffic::arrays[i].loaded, stored[i] = traffic::arrays[i].stored;
        free(traffic::arrays[i].seen);
    }
    traffic::num_arrays = 0;
}

#define COUNTED(bytes)                                                                                            \
    UNCOUNTED void __sanitizer_cov_load##bytes(const void* address) { traffic::load(address); }                   \
    UNCOUNTED void __sanitizer_cov_store##bytes(const void* address) { traffic::store(address, bytes); }
COUNTED(1)
COUNTED(2)
COUNTED(4)
COUNTED(8)
COUNTED(16)
#undef COUNTED
}
