/* A heap of entries, for loops that plan. */

#include <stdint.h>
#include <string.h>

/* Of a heap: its least key first, of equal ones the least group. */
typedef struct {
    int64_t key, group;
} entry;

/* Keys are in the order of these numbers, but compared without a jump, in half the time. */
static int64_t key_of(double number)
{
    int64_t bits;
    number += 0.0; /* -0 is 0 */
    memcpy(&bits, &number, sizeof bits);
    return bits ^ (bits < 0 ? INT64_MAX : 0);
}

static double number_of(int64_t key)
{
    double number;
    key ^= key < 0 ? INT64_MAX : 0;
    memcpy(&number, &key, sizeof number);
    return number;
}

static int precedes(entry a, entry b)
{
#ifdef __SIZEOF_INT128__ /* two instructions */
    return ((__int128)a.key << 64 | (uint64_t)a.group) < ((__int128)b.key << 64 | (uint64_t)b.group);
#else
    return (a.key < b.key) | ((a.key == b.key) & (a.group < b.group));
#endif
}

/* Let an entry rise from a place that is free. */
static void rise(entry *heap, int64_t at, entry added)
{
    for (; at && precedes(added, heap[(at - 1) / 2]); at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = added;
}

static void push(entry *heap, int64_t *size, entry added) { rise(heap, (*size)++, added); }

/* Replace the first entry, mostly by one of the last: its place moves to the end of the heap first. */
static void replace_first(entry *heap, int64_t size, entry added)
{
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        child += child + 1 < size && precedes(heap[child + 1], heap[child]);
        heap[at] = heap[child];
    }
    rise(heap, at, added);
}

static entry pop(entry *heap, int64_t *size)
{
    entry first = heap[0];
    --*size;
    replace_first(heap, *size, heap[*size]);
    return first;
}
