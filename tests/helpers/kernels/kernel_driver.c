/* Calls one kernel of a library for another processor, under an emulator: kernel_driver LIBRARY REQUEST.
 *
 * REQUEST is rewritten in place. It holds, in the byte order of both machines:
 *   name of the kernel [120]; int32 threads, arguments
 *   per argument: int64 size of its memory, offset of the array in it; int32 dimensions, type code, bits, 0;
 *                 int64 shape [8]
 *   the memory of all arguments, one after the other
 * An array lies at a multiple of 64 bytes, as the runtime has it. Exits with 1, and says why, if anything fails. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../../codegen/picompile_codegen/build/native/abi.h"

#define MAX_ARGUMENTS 64

typedef struct {
  char name[120];
  int32_t threads, arguments;
} Header;

typedef struct {
  int64_t size, offset;
  int32_t dimensions, code, bits, padding;
  int64_t shape[8];
} Described;

static void fail(const char *what, const char *why) {
  fprintf(stderr, "%s: %s\n", what, why ? why : "");
  exit(1);
}

int main(int count, char **arguments) {
  static Described described[MAX_ARGUMENTS];
  static PiTensor tensors[MAX_ARGUMENTS];
  static PiAny args[MAX_ARGUMENTS];
  static int64_t strides[MAX_ARGUMENTS][8];
  static char *memory[MAX_ARGUMENTS];
  Header header;
  if (count != 3) fail("usage", "kernel_driver LIBRARY REQUEST");
  void *library = dlopen(arguments[1], RTLD_NOW);
  if (!library) fail("dlopen", dlerror());
  typedef int (*Run)(const PiCall *, int, int, int64_t (*)[2]);
  Run run = (Run)dlsym(library, "pi_run");
  const char *(*last_error)(void) = (const char *(*)(void))dlsym(library, "pi_last_error");
  FILE *file = fopen(arguments[2], "r+b");
  if (!run || !last_error || !file) fail("cannot start", dlerror());
  if (fread(&header, sizeof header, 1, file) != 1 || header.arguments > MAX_ARGUMENTS) fail("request", "header");
  size_t known = (size_t)header.arguments;
  if (fread(described, sizeof(Described), known, file) != known) fail("request", "arguments");
  long data = ftell(file);
  for (size_t i = 0; i < known; ++i) {
    Described *one = &described[i];
    size_t before = (size_t)(-one->offset & 63);
    char *block = aligned_alloc(64, (before + (size_t)one->size + 63) / 64 * 64);
    if (!block) fail("memory", "out of it");
    memory[i] = block + before;
    if (fread(memory[i], 1, (size_t)one->size, file) != (size_t)one->size) fail("request", "memory");
    int64_t stride = 1;
    for (int axis = one->dimensions - 1; axis >= 0; stride *= one->shape[axis--]) strides[i][axis] = stride;
    tensors[i] = (PiTensor){memory[i] + one->offset, 1, 0, one->dimensions, (uint8_t)one->code, (uint8_t)one->bits, 1,
                          one->shape, strides[i], 0};
    args[i] = (PiAny){7, 0, &tensors[i]};
  }
  PiCall call = {(PiKernel)dlsym(library, header.name), args, header.arguments, 0};
  if (!call.kernel) fail("kernel", header.name);
  if (run(&call, 1, header.threads, NULL) != -1) fail("run", last_error());
  fseek(file, data, SEEK_SET);
  for (size_t i = 0; i < known; ++i)
    if (fwrite(memory[i], 1, (size_t)described[i].size, file) != (size_t)described[i].size) fail("write", "memory");
  fclose(file);
  return 0;
}
