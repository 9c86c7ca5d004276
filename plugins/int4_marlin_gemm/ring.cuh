// A warp's stream of tiles: shared memory that the copy engine fills STAGES pieces of STAGE_TILES tiles ahead.
//
// Loads into registers would have to be waited for in the order of a handful of scoreboards; the ring keeps
// STAGES pieces in flight however far the warps drift apart, and costs one lane one instruction a piece.
#pragma once
#include "tile.cuh"

constexpr int STAGE_BYTES = STAGE_TILES * TILE_BYTES;
constexpr int X_TILES = STAGE_TILES % 4 == 0 ? 4 : STAGE_TILES;  // tiles whose activations are fetched together
constexpr int PARTS = STAGE_TILES / X_TILES;

struct Ring {
    u8* pieces;     // [STAGES][STAGE_BYTES]
    u64* barriers;  // [STAGES]
    int slot;       // the piece that is read next
    u32 parity;

    // `memory` is the block's: rings of WARPS warps, then their barriers.
    __device__ __forceinline__ Ring(u8* memory, int warp, int lane) {
        pieces = memory + warp * STAGES * STAGE_BYTES;
        barriers = (u64*)(memory + WARPS * STAGES * STAGE_BYTES) + warp * STAGES;
        slot = 0;
        parity = 0;
        if (lane < STAGES) mbarrier_init(barriers + lane);
        __syncwarp();
    }

    // Ask for the data of the piece at the ring's position, which nobody reads any more.
    __device__ __forceinline__ void request(const u8* from, int lane) {
        if (lane == 0) bulk_load(pieces + slot * STAGE_BYTES, from, STAGE_BYTES, barriers + slot);
    }

    __device__ __forceinline__ const u8* wait() {
        mbarrier_wait(barriers + slot, parity);
        return pieces + slot * STAGE_BYTES;
    }

    __device__ __forceinline__ void advance() {
        if (++slot == STAGES) {
            slot = 0;
            parity ^= 1;
        }
    }
};

constexpr int RING_BYTES = WARPS * STAGES * (STAGE_BYTES + 8);
static_assert(STAGES <= 32 && STAGE_BYTES % 16 == 0, "a lane initialises a barrier");
