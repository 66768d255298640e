// A CUDA runtime without a GPU: device memory is host memory, and a stream is a thread.
//
// Kernels never run here. python/_fakecuda.py replaces each kernel of torch by a call on the CPU, which waits for the
// current stream first. Copies and fills do the same. So only the tasks of the fake NCCL, waits for events and host
// functions are asynchronous.

#include "fake_cudart.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "settings.h"

namespace {

constexpr size_t kMemoryBytes = 8ull << 30;
constexpr int kFill = 0xFF;  // new memory contains NaN in every floating-point format

struct Event {
  Stream* stream = nullptr;  // null until the event is recorded
  uint64_t ticket = 0;
  double seconds = 0;
};

struct Block {
  size_t bytes;
  int device;
};

std::mutex g_mutex;  // protects the following three
std::map<int, Stream*> g_default_streams;
std::vector<Stream*> g_streams;
std::map<uintptr_t, Block> g_blocks;

std::map<const void*, std::string> g_kernel_names;
pid_t g_initialised_in = 0;
thread_local int t_device = 0;
thread_local cudaError_t t_last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) {
  t_last_error = error;
  return error;
}

// Return the GPUs of the machine that CUDA_VISIBLE_DEVICES leaves, in its order.
const std::vector<int>& visible_gpus() {
  static const std::vector<int> gpus = [] {
    const int installed = static_cast<int>(find_number("FAKE_GPUS", 1));
    std::vector<int> found;
    const char* list = std::getenv("CUDA_VISIBLE_DEVICES");
    if (list == nullptr) {
      for (int gpu = 0; gpu < installed; gpu++) found.push_back(gpu);
      return found;
    }
    std::istringstream entries(list);
    for (std::string entry; std::getline(entries, entry, ',');) {
      const int gpu = entry.empty() ? -1 : std::atoi(entry.c_str());
      if (gpu < 0 || gpu >= installed) break;  // as CUDA does: an invalid entry ends the list
      found.push_back(gpu);
    }
    return found;
  }();
  return gpus;
}

// Add a line to the file FAKE_CUDA_LOG. With hidden GPUs, the real runtime does not call cuInit either.
void log_initialisation() {
  const std::string path = find_setting("FAKE_CUDA_LOG", "");
  if (path.empty()) return;
  if (FILE* log = std::fopen(path.c_str(), "a")) {
    std::ifstream file("/proc/self/cmdline");
    std::string command((std::istreambuf_iterator<char>(file)), {});
    std::replace(command.begin(), command.end(), '\0', ' ');
    std::fprintf(log, "process %d initialised CUDA: %.200s\n", getpid(), command.c_str());
    std::fclose(log);
  }
}

// Every call that needs the driver starts here. CUDA cannot be used in a child of the process that initialised it.
cudaError_t initialise() {
  if (g_initialised_in == 0) {
    g_initialised_in = getpid();
    if (!visible_gpus().empty()) log_initialisation();
  }
  if (g_initialised_in != getpid()) return fail(cudaErrorInitializationError);
  if (visible_gpus().empty()) return fail(cudaErrorNoDevice);
  return cudaSuccess;
}

#define INITIALISE()                              \
  do {                                            \
    const cudaError_t error = initialise();       \
    if (error != cudaSuccess) return error;       \
  } while (0)

void drain(Stream* stream) { stream->wait(stream->last_ticket()); }

double read_clock() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

cudaError_t copy(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  INITIALISE();
  drain(find_stream(stream));
  std::memmove(to, from, bytes);
  return cudaSuccess;
}

cudaError_t fill(void* at, int value, size_t bytes, cudaStream_t stream) {
  INITIALISE();
  drain(find_stream(stream));
  std::memset(at, value, bytes);
  return cudaSuccess;
}

cudaError_t refuse_kernel(const void* kernel) {
  const auto found = g_kernel_names.find(kernel);
  const char* name = found == g_kernel_names.end() ? "(unknown)" : found->second.c_str();
  std::fprintf(stderr, "fake CUDA: the kernel %s is not simulated\n", name);
  return fail(cudaErrorNotSupported);
}

}  // namespace

void Stream::push(std::function<void()> task) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!has_worker_) std::thread(&Stream::work, this).detach();
    has_worker_ = true;
    tasks_.push_back(std::move(task));
    queued_++;
  }
  changed_.notify_all();
}

void Stream::work() {
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      done_++;
    }
    changed_.notify_all();
  }
}

uint64_t Stream::last_ticket() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return queued_;
}

void Stream::wait(uint64_t ticket) {
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [this, ticket] { return done_ >= ticket; });
}

bool Stream::is_done(uint64_t ticket) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return done_ >= ticket;
}

Stream* find_stream(cudaStream_t handle) {
  if (handle != nullptr && handle != cudaStreamLegacy && handle != cudaStreamPerThread) {
    return reinterpret_cast<Stream*>(handle);
  }
  const std::lock_guard<std::mutex> lock(g_mutex);
  Stream*& stream = g_default_streams[t_device];
  if (stream == nullptr) {
    stream = new Stream(t_device);
    g_streams.push_back(stream);
  }
  return stream;
}

extern "C" {

// _fakecuda.py calls this function before each kernel.
void fakecuda_drain(cudaStream_t stream, int device) {
  const int current = t_device;
  t_device = device;  // a null handle means its default stream
  drain(find_stream(stream));
  t_device = current;
}

int fakecuda_is_initialised() { return g_initialised_in == getpid(); }

// Devices

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 0;
  INITIALISE();
  *count = static_cast<int>(visible_gpus().size());
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* device) {
  INITIALISE();
  *device = t_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  INITIALISE();
  if (device < 0 || device >= static_cast<int>(visible_gpus().size())) return fail(cudaErrorInvalidDevice);
  t_device = device;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  INITIALISE();
  *properties = {};
  std::snprintf(properties->name, sizeof properties->name, "Fake GPU");
  properties->uuid.bytes[0] = static_cast<char>(visible_gpus().at(device) + 1);
  properties->totalGlobalMem = kMemoryBytes;
  properties->major = 9;
  properties->minor = 0;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxThreadsDim[0] = 1024;
  properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = 65535;
  properties->maxGridSize[2] = 65535;
  properties->regsPerBlock = 65536;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->l2CacheSize = 1 << 25;
  properties->unifiedAddressing = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* id, int length, int device) {
  INITIALISE();
  std::snprintf(id, length, "0000:%02x:00.0", visible_gpus().at(device) + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  INITIALISE();
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  INITIALISE();
  std::vector<Stream*> streams;
  {
    const std::lock_guard<std::mutex> lock(g_mutex);
    streams = g_streams;
  }
  for (Stream* stream : streams) {
    if (stream->device == t_device) drain(stream);
  }
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

// Memory

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  INITIALISE();
  if (posix_memalign(pointer, 512, bytes == 0 ? 512 : bytes) != 0) return fail(cudaErrorMemoryAllocation);
  std::memset(*pointer, kFill, bytes);
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_blocks[reinterpret_cast<uintptr_t>(*pointer)] = {bytes, t_device};
  return cudaSuccess;
}

cudaError_t cudaFree(void* pointer) {
  INITIALISE();
  {
    const std::lock_guard<std::mutex> lock(g_mutex);
    g_blocks.erase(reinterpret_cast<uintptr_t>(pointer));
  }
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) {
  INITIALISE();
  return posix_memalign(pointer, 4096, bytes) == 0 ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFreeHost(void* pointer) {
  std::free(pointer);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = kMemoryBytes - (1ull << 30);
  *total_bytes = kMemoryBytes;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy(to, from, bytes, nullptr);
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}

cudaError_t cudaMemset(void* at, int value, size_t bytes) { return fill(at, value, bytes, nullptr); }

cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  return fill(at, value, bytes, stream);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  *attributes = {};
  attributes->type = cudaMemoryTypeUnregistered;
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  const std::lock_guard<std::mutex> lock(g_mutex);
  auto block = g_blocks.upper_bound(address);
  if (block == g_blocks.begin()) return cudaSuccess;
  --block;
  if (address < block->first + block->second.bytes) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = block->second.device;
    attributes->devicePointer = const_cast<void*>(pointer);
  }
  return cudaSuccess;
}

// Streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned, int) {
  INITIALISE();
  auto* stream = new Stream(t_device);
  const std::lock_guard<std::mutex> lock(g_mutex);
  g_streams.push_back(stream);
  *handle = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  return cudaStreamCreateWithPriority(handle, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // its worker may still have tasks

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  INITIALISE();
  drain(find_stream(stream));
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Stream* stream = find_stream(handle);
  return stream->is_done(stream->last_ticket()) ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  Stream* waiting = find_stream(handle);
  Stream* recorded = reinterpret_cast<Event*>(event)->stream;
  const uint64_t ticket = reinterpret_cast<Event*>(event)->ticket;
  if (recorded == nullptr || recorded == waiting || recorded->is_done(ticket)) return cudaSuccess;
  waiting->push([recorded, ticket] { recorded->wait(ticket); });
  return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  INITIALISE();
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 0;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  find_stream(stream)->push([function, argument] { function(argument); });
  return cudaSuccess;
}

// Events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  INITIALISE();
  *event = reinterpret_cast<cudaEvent_t>(new Event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned) {
  Stream* stream = find_stream(handle);
  *reinterpret_cast<Event*>(event) = {stream, stream->last_ticket(), read_clock()};
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const auto* event = reinterpret_cast<Event*>(handle);
  const bool is_done = event->stream == nullptr || event->stream->is_done(event->ticket);
  return is_done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const auto* event = reinterpret_cast<Event*>(handle);
  if (event->stream != nullptr) event->stream->wait(event->ticket);
  return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  const double seconds = reinterpret_cast<Event*>(end)->seconds - reinterpret_cast<Event*>(start)->seconds;
  *milliseconds = static_cast<float>(1e3 * seconds);
  return cudaSuccess;
}

// Errors

cudaError_t cudaPeekAtLastError() { return t_last_error; }

cudaError_t cudaGetLastError() {
  const cudaError_t error = t_last_error;
  t_last_error = cudaSuccess;
  return error;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorInitializationError:
      return "initialization error";
    case cudaErrorNoDevice:
      return "no CUDA-capable device is detected";
    case cudaErrorInvalidDevice:
      return "invalid device ordinal";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNotSupported:
      return "operation not supported (by the fake CUDA runtime)";
    default:
      return "an error of the fake CUDA runtime";
  }
}

const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

// Kernels: torch's libraries register them when they are loaded.

void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}

void __cudaRegisterFatBinaryEnd(void**) {}

void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void**, const char* kernel, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
  g_kernel_names[kernel] = name;
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

unsigned __cudaPushCallConfiguration(...) { return 0; }

cudaError_t __cudaPopCallConfiguration(...) { return cudaSuccess; }

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse_kernel(kernel);
}

cudaError_t __cudaLaunchKernel(const void* kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse_kernel(kernel);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* kernel, void**) {
  return refuse_kernel(kernel);
}

}  // extern "C"
