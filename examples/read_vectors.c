/* A golden vector without Python: reads one array of a safetensors file, makes it again from its design, and compares.
 *
 *     cc -O2 -o read_vectors read_vectors.c -lm
 *     ./read_vectors softmax/tiny.safetensors q normal 1 softmax.tiny.q
 *
 * The arguments are FILE NAME DESIGN NUMBERS STREAM, as the manifest has them: NUMBERS are those of the design with
 * commas between, in the order of docs/vectors.md, which specifies everything that is done here.
 * The exit code is 0 where every number is the same, 1 where one is not, and 2 otherwise. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fail(const char *why) {
    fprintf(stderr, "read_vectors: %s\n", why);
    exit(2);
}

static uint32_t crc32(const char *text) { /* the CRC-32 of zlib */
    uint32_t crc = 0xFFFFFFFFu;
    for (; *text; text++) {
        crc ^= (unsigned char)*text;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
    }
    return ~crc;
}

static uint32_t word(uint64_t i, uint32_t purpose) { /* word i of a stream with seed, step and layer 0: Philox4x32-10 */
    uint32_t c[4] = {(uint32_t)(i / 4), purpose, 0, 0}, key[2] = {0, 0};
    for (int round = 0; round < 10; round++) {
        uint64_t p = (uint64_t)0xD2511F53u * c[0], q = (uint64_t)0xCD9E8D57u * c[2];
        uint32_t c1 = c[1], c3 = c[3];
        c[0] = (uint32_t)(q >> 32) ^ c1 ^ key[0], c[1] = (uint32_t)q;
        c[2] = (uint32_t)(p >> 32) ^ c3 ^ key[1], c[3] = (uint32_t)p;
        key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
    }
    return c[i % 4];
}

static double to_bfloat16(double x) { /* the nearest number with 8 significant bits, ties to even */
    int exponent;
    if (x == 0.0) return x;
    frexp(x, &exponent);
    double step = ldexp(1.0, (exponent - 1 < -126 ? -126 : exponent - 1) - 7);
    return rint(x / step) * step;
}

/* Element e of an array whose last two axes are rows of this width. */
static double made(uint64_t e, const char *design, const double *n, uint64_t rows, uint64_t width, uint32_t purpose) {
    uint64_t row = e / width % rows, w = word(e, purpose), span = (uint64_t)(int64_t)(n[1] - n[0] + 1.0);
    if (!strcmp(design, "mask")) return (double)(w >> 8) * ldexp(1.0, -24) < n[0];
    if (!strcmp(design, "ranks")) return e % width ? 0.0 : n[0] * (double)(1 + row / (uint64_t)n[1]);
    if (!strcmp(design, "integers")) return n[0] + (double)(span * w >> 32);
    if (!strcmp(design, "powers")) return ldexp((2 * span * w >> 32) % 2 ? -1.0 : 1.0, (int)n[0] + (int)(span * w >> 32));
    if (!strcmp(design, "units")) return row * (uint64_t)n[0] % (uint64_t)n[1] == e % width;
    if (!strcmp(design, "burst") && row == (uint64_t)n[2]) return to_bfloat16(n[1]);
    if (!strcmp(design, "resets") && row % (uint64_t)n[1] == (uint64_t)n[1] - 1) return -INFINITY;
    if (strchr("ub", *design) || !strcmp(design, "resets")) /* uniform, burst and resets: the last two from low to 0 */
        return to_bfloat16((float)(n[0] + ((*design == 'u' ? n[1] : 0.0) - n[0]) * ((double)(w >> 8) * ldexp(1.0, -24))));
    if (!strcmp(design, "repeated")) e -= (row - row % (uint64_t)n[1]) * width;
    uint32_t first = word(2 * e, purpose), second = word(2 * e + 1, purpose);
    double x = (double)(2 * (int64_t)((first & 0xFFFF) + (first >> 16) + (second & 0xFFFF)) - 196605) * ldexp(1.0, -16);
    return to_bfloat16(x * n[0] + (!strcmp(design, "shifted") && row % (uint64_t)n[2] == 0 ? n[1] : 0.0));
}

int main(int argc, char **argv) {
    if (argc != 6) fail("needs FILE NAME DESIGN NUMBERS STREAM");
    int mask = !strcmp(argv[3], "mask");
    double numbers[3] = {0.0, 0.0, 1.0};
    if (sscanf(argv[4], "%lf,%lf,%lf", numbers, numbers + 1, numbers + 2) < 1) fail("NUMBERS: needs a number");
    FILE *file = fopen(argv[1], "rb");
    unsigned char size[8];
    if (!file || fseek(file, 0, SEEK_END)) fail("FILE: cannot be read");
    uint64_t length = 0, whole = (uint64_t)ftell(file);
    rewind(file);
    if (fread(size, 1, 8, file) != 8) fail("FILE: is no safetensors file");
    for (int n = 7; n >= 0; n--) length = length << 8 | size[n];
    if (length > whole - 8) fail("FILE: its header is longer than the file"); /* before anything is allocated */
    char *header = calloc(length + 1, 1), key[256];
    if (!header || fread(header, 1, length, file) != length) fail("FILE: its header cannot be read");
    snprintf(key, sizeof key, "\"%s/%s\":{", mask ? "bool" : "float64", argv[2]);
    char *entry = strstr(header, key), *offsets = entry ? strstr(entry, "\"data_offsets\":[") : NULL;
    char *shape = entry ? strstr(entry, "\"shape\":[") : NULL;
    uint64_t rows = 1, width = 1;
    for (shape = shape ? shape + 8 : NULL; shape && *shape != ']';) rows = width, width = strtoull(shape + 1, &shape, 10);
    unsigned long long first, last;
    if (!offsets || sscanf(offsets, "\"data_offsets\":[%llu,%llu]", &first, &last) != 2) fail("NAME: not there");
    if (last < first || last > whole - 8 - length) fail("FILE: an array reaches beyond its end");
    unsigned char *data = malloc(last - first + 1);
    if (!data || fseek(file, (long)(8 + length + first), SEEK_SET) || fread(data, 1, last - first, file) < last - first)
        fail("FILE: the array cannot be read");
    uint64_t count = (last - first) / (mask ? 1 : sizeof(double));
    for (uint64_t e = 0; e < count; e++) {
        double x, expected = made(e, argv[3], numbers, rows, width, crc32(argv[5]));
        if (mask) x = data[e]; else memcpy(&x, data + e * sizeof x, sizeof x); /* of a little-endian machine */
        if (x == expected) continue;
        printf("%s: element %llu is %.17g, made %.17g\n", argv[2], (unsigned long long)e, x, expected);
        return 1;
    }
    printf("%s: %llu numbers, every bit the same\n", argv[2], (unsigned long long)count);
    return 0;
}
