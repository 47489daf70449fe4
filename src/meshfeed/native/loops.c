/* Loops of meshfeed that NumPy cannot run in one pass.

   Plain C11 against libc. Python calls each function once per portion, without the interpreter lock; the
   module that calls it also holds a NumPy version with the same bits, which runs where nothing is compiled.
   Every function checks the ranges that it is given: it stops at the first one outside its arrays, and
   returns how many it did, so that the caller can name the rest in an error. No float sum may depend on
   vector width or fused operations: see the flags in hatch_build.py. */

#define _GNU_SOURCE
#define _FILE_OFFSET_BITS 64
#include <stdint.h>
#include <string.h>
#include <unistd.h>

/* Whether [at, at + size) lies in [0, all). */
static int inside(int64_t at, int64_t size, int64_t all)
{
    return at >= 0 && size >= 0 && size <= all && at <= all - size;
}

/* Read `sizes` bytes at each of `begins` to each of `places` in `out`, which has `room` bytes. Returns how
   many ranges were read whole; the caller repeats the next one, which fails or was interrupted. */
int64_t mf_read_ranges(int64_t fd, char *out, int64_t room, int64_t num_ranges,
                       const int64_t *begins, const int64_t *sizes, const int64_t *places)
{
    for (int64_t i = 0; i < num_ranges; i++)
        if (!inside(places[i], sizes[i], room)
            || pread((int)fd, out + places[i], (size_t)sizes[i], begins[i]) != sizes[i])
            return i;
    return num_ranges;
}

#define WIDEN(name, type)                                                                   \
    static void name(const void *restrict from, int64_t *restrict to, int64_t size)         \
    {                                                                                       \
        const type *values = from;                                                          \
        for (int64_t i = 0; i < size; i++)                                                  \
            to[i] = values[i];                                                              \
    }
WIDEN(widen_u8, uint8_t)
WIDEN(widen_i8, int8_t)
WIDEN(widen_u16, uint16_t)
WIDEN(widen_i16, int16_t)
WIDEN(widen_u32, uint32_t)
WIDEN(widen_i32, int32_t)

static void (*const widen[])(const void *restrict, int64_t *restrict, int64_t)
    = {widen_u8, widen_i8, widen_u16, widen_i16, widen_u32, widen_i32};

/* In each row, copy `size` elements from `start` to `at`, for each of `num_runs` runs.

   kind: an index into `widen`, which makes int64 of them; -1 copies bytes. Item sizes and strides are in
   bytes, widths in elements. Returns how many runs were copied, counted over all rows. */
int64_t mf_copy_runs(int64_t kind, int64_t num_rows,
                     const char *read, int64_t read_item, int64_t read_stride, int64_t read_width,
                     char *out, int64_t out_item, int64_t out_stride, int64_t out_width,
                     int64_t num_runs, const int64_t *at, const int64_t *start, const int64_t *size)
{
    for (int64_t row = 0; row < num_rows; row++, read += read_stride, out += out_stride)
        for (int64_t i = 0; i < num_runs; i++) {
            if (!inside(at[i], size[i], out_width) || !inside(start[i], size[i], read_width))
                return row * num_runs + i;
            const char *from = read + start[i] * read_item;
            char *to = out + at[i] * out_item;
            if (kind < 0)
                memcpy(to, from, (size_t)(size[i] * out_item));
            else
                widen[kind](from, (int64_t *)to, size[i]);
        }
    return num_rows * num_runs;
}
