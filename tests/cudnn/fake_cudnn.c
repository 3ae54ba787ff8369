/* A library with cuDNN's interface that does as DOES says: no cuDNN is needed to test what befalls one. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { REFUSES = 1, CRASHES = 2, HANGS = 3, ANSWERS = 4, KNOWS_NO_CARD = 5 };
enum { ENGINE_HEURISTICS = 4, DEVICE_PROPERTIES = 38 };
enum { RESULTS = 202, ENGINE_OF_CONFIG = 300, WORKSPACE = 402, ENGINE_INDEX = 1301, NOTES = 1303 };
enum { NOT_SUPPORTED = 3000 };

size_t cudnnGetVersion(void) { return VERSION; }
size_t cudnnGetCudartVersion(void) { return 99000; }
const char *cudnnGetErrorString(int status) { return status == NOT_SUPPORTED ? "NOT_SUPPORTED" : "?"; }
void cudnnGetLastErrorString(char *text, size_t size) { strncpy(text, "made to refuse", size); }

int cudnnBackendCreateDescriptor(int kind, void **made) {
  int *descriptor = malloc(sizeof(int));
  *descriptor = kind;
  *made = descriptor;
  return 0;
}

int cudnnBackendDestroyDescriptor(void *descriptor) { free(descriptor); return 0; }
int cudnnBackendSetAttribute(void *d, int attribute, int type, long count, const void *values) { return 0; }

int cudnnBackendFinalize(void *descriptor) {
  int kind = *(int *)descriptor;
  if (kind == DEVICE_PROPERTIES && DOES == KNOWS_NO_CARD) return NOT_SUPPORTED;
  if (kind != ENGINE_HEURISTICS) return 0;
  if (DOES == CRASHES) abort();
  if (DOES == HANGS) sleep(600);
  return DOES == REFUSES ? NOT_SUPPORTED : 0;
}

int cudnnBackendGetAttribute(void *d, int attribute, int type, long most, long *count, void *values) {
  *count = attribute == NOTES ? 0 : attribute == RESULTS ? 2 : 1;
  if (attribute == WORKSPACE) *(long *)values = 4096;
  if (attribute == ENGINE_INDEX) *(long *)values = 7;
  return 0;
}
