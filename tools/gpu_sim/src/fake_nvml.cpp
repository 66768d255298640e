// The part of NVML with which torch counts GPUs without initialising CUDA.

#include <cstdint>
#include <cstdio>

#include "settings.h"

namespace {

constexpr int kSuccess = 0;
constexpr int kInvalidArgument = 2;
constexpr int kDriverNotLoaded = 9;

int count_gpus() { return static_cast<int>(find_number("FAKE_GPUS", 1)); }

}  // namespace

extern "C" {

int nvmlInit_v2() {
  const bool works = find_number("FAKE_DRIVER", 13000) && find_number("FAKE_NVML", 1);
  return works ? kSuccess : kDriverNotLoaded;
}

int nvmlInit() { return nvmlInit_v2(); }

int nvmlShutdown() { return kSuccess; }

int nvmlDeviceGetCount_v2(int* count) {
  *count = count_gpus();
  return kSuccess;
}

int nvmlDeviceGetCount(int* count) { return nvmlDeviceGetCount_v2(count); }

int nvmlDeviceGetHandleByIndex_v2(int index, void** handle) {
  *handle = reinterpret_cast<void*>(static_cast<intptr_t>(index) + 1);
  return index >= 0 && index < count_gpus() ? kSuccess : kInvalidArgument;
}

int nvmlDeviceGetUUID(void* handle, char* uuid, unsigned length) {
  const int number = static_cast<int>(reinterpret_cast<intptr_t>(handle));
  std::snprintf(uuid, length, "GPU-%08d-0000-0000-0000-000000000000", number);
  return kSuccess;
}

int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = static_cast<int>(find_number("FAKE_DRIVER", 13000));
  return kSuccess;
}

const char* nvmlErrorString(int) { return "an error of the fake NVML"; }

}  // extern "C"
