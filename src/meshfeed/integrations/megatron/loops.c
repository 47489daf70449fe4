/* Loops of Megatron's order that NumPy cannot run in one pass: see gpt_order.py, and meshfeed/native/loops.c, whose
   rules they keep. */

#include <math.h>
#include <stdint.h>

static double larger(double a, double b) { return a > b ? a : b; }

/* Always the dataset that lags most behind its share, the first of equals: `_blend`, one step at a time.

   A dataset that reaches its limit is left out. Changes `shares` and `counts`; `lag` is scratch. */
int64_t mf_blend(int64_t num_datasets, double *shares, const double *limits, double *counts, double *lag,
                 int64_t num_steps, int16_t *dataset, int64_t *sample)
{
    if (num_datasets < 1)
        return 0;
    for (int64_t t = 0; t < num_steps; t++) {
        double step = t ? (double)t : 1, most[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
        int64_t i = 0, best = 0;
        for (; i + 4 <= num_datasets; i += 4) /* four maxima, so that none waits for the one before it */
            for (int k = 0; k < 4; k++) {
                lag[i + k] = shares[i + k] * step - counts[i + k];
                most[k] = larger(lag[i + k], most[k]);
            }
        for (; i < num_datasets; i++) {
            lag[i] = shares[i] * step - counts[i];
            most[0] = larger(lag[i], most[0]);
        }
        double top = larger(larger(most[0], most[1]), larger(most[2], most[3]));
        while (lag[best] < top)
            best++;
        dataset[t] = (int16_t)best;
        sample[t] = (int64_t)counts[best];
        counts[best] += 1;
        if (counts[best] >= limits[best])
            shares[best] = -INFINITY;
    }
    return num_steps;
}

/* RandomState.shuffle of NumPy. It draws ahead, so that the memory of many swaps is fetched at once.

   size: at most 2**32. next: a generator's next_uint32; its draws above `last`, masked, are not used. */
#define AHEAD 256
#define SHUFFLE(name, type)                                                                 \
    static void name(type *items, int64_t size, uint32_t (*next)(void *), void *state)      \
    {                                                                                       \
        uint32_t other[AHEAD];                                                              \
        for (int64_t last = size - 1; last > 0;) {                                          \
            int64_t count = last < AHEAD ? last : AHEAD;                                    \
            for (int64_t k = 0; k < count; k++) {                                           \
                uint32_t most = (uint32_t)(last - k), mask = UINT32_MAX >> __builtin_clz(most); \
                do                                                                          \
                    other[k] = next(state) & mask;                                          \
                while (other[k] > most);                                                    \
                __builtin_prefetch(items + other[k], 1);                                    \
            }                                                                               \
            for (int64_t k = 0; k < count; k++, last--) {                                   \
                type kept = items[last];                                                    \
                items[last] = items[other[k]];                                              \
                items[other[k]] = kept;                                                     \
            }                                                                               \
        }                                                                                   \
    }
SHUFFLE(shuffle_4, uint32_t)
SHUFFLE(shuffle_8, uint64_t)

int64_t mf_shuffle(void *items, int64_t size, int64_t item_bytes, uint32_t (*next)(void *), void *state)
{
    if (item_bytes == 4)
        shuffle_4(items, size, next, state);
    else
        shuffle_8(items, size, next, state);
    return size;
}
