// The AMX tile instructions in software (Intel SDM volume 2: LDTILECFG, TILELOADD, TDPBF16PS, TILESTORED), included before
// the sources of the kernels, so that tests run the AMX kernels on processors without AMX.
#pragma once
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#define __AMX_BF16__ 1
#define __AMX_TILE__ 1
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_loadconfig

inline thread_local struct {
    bool ready;  // the tiles are configured, for each thread by itself
    float tile[8][16][16];
} amx;

inline void emulate_loadconfig(const void* from) {  // all tiles must have 16 rows of 64 bytes, in palette 1
    const uint8_t* config = (const uint8_t*)from;
    for (int t = 0; t < 8; ++t)
        if (config[0] != 1 || config[16 + 2 * t] != 64 || config[17 + 2 * t] || config[48 + t] != 16) __builtin_trap();
    amx.ready = true;
}
inline void emulate_loadd(int t, const void* from, long stride) {
    if (!amx.ready) __builtin_trap();
    for (int r = 0; r < 16; ++r) memcpy(amx.tile[t][r], (const char*)from + r * stride, 64);
}
inline void emulate_stored(int t, void* to, long stride) {
    if (!amx.ready) __builtin_trap();
    for (int r = 0; r < 16; ++r) memcpy((char*)to + r * stride, amx.tile[t][r], 64);
}
inline float emulate_value(uint16_t half) {  // denormal numbers count as zero
    uint32_t bits = uint32_t(half) << 16;
    if (!(bits & 0x7f800000)) bits &= 0x80000000;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline void emulate_dpbf16ps(int c, int a, int b) {
    if (!amx.ready) __builtin_trap();
    for (int m = 0; m < 16; ++m)
        for (int k = 0; k < 16; ++k)
            for (int n = 0; n < 16; ++n) {
                const uint16_t* x = (const uint16_t*)amx.tile[a][m] + 2 * k;
                const uint16_t* w = (const uint16_t*)amx.tile[b][k] + 2 * n;
                amx.tile[c][m][n] = std::fma(emulate_value(x[1]), emulate_value(w[1]),
                                             std::fma(emulate_value(x[0]), emulate_value(w[0]), amx.tile[c][m][n]));
            }
}
#define _tile_zero(t) memset(amx.tile[t], 0, sizeof amx.tile[t])
#define _tile_loadd(t, from, stride) emulate_loadd(t, from, stride)
#define _tile_stored(t, to, stride) emulate_stored(t, to, stride)
#define _tile_dpbf16ps(c, a, b) emulate_dpbf16ps(c, a, b)
#define _tile_loadconfig(config) emulate_loadconfig(config)
#define syscall(...) 0L  // the system's leave to use the tiles
