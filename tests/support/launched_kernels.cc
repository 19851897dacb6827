// Which kernels a test program launches: it calls CUDA's runtime by way of here (the linker's
// --wrap), which learns the names of all kernels that the program holds, and which of them run.
// Where the environment names a file as WRITESCOPE_KERNELS, a line for each is added to it at the
// end; tests/engine/cuda_sanitizers.sh asks by them whether it has seen every kernel.
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <string_view>

namespace {

struct Kernel {
  std::string name;
  bool launched = false;
};

struct Kernels {
  std::mutex mutex;
  std::map<const void*, Kernel> by_stub;  // By the host's function that stands for it
};

Kernels& AllKernels() {
  static Kernels* kernels = new Kernels;
  return *kernels;
}

void Erase(std::string_view what, std::string* text) {
  for (size_t at; (at = text->find(what)) != std::string::npos;) text->erase(at, what.size());
}

// As the source has it: without namespaces, parameters and type of result.
std::string PlainName(const std::string& mangled) {
  int status = 0;
  char* demangled = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  if (demangled == nullptr) return mangled;
  std::string name = demangled;
  std::free(demangled);
  Erase("(anonymous namespace)::", &name);
  Erase("writescope::kernels::", &name);
  Erase("writescope::device::", &name);
  int depth = 0;
  size_t end = name.size();
  while (end > 0) {
    --end;
    if (name[end] == ')') ++depth;
    if (name[end] == '(' && --depth == 0) break;
  }
  name.resize(end);
  if (name.starts_with("void ")) name.erase(0, 5);
  return name;
}

void WriteNames() {
  const char* path = std::getenv("WRITESCOPE_KERNELS");
  if (path == nullptr) return;
  std::ofstream file(path, std::ios::app);
  Kernels& kernels = AllKernels();
  std::lock_guard lock(kernels.mutex);
  for (const auto& [stub, kernel] : kernels.by_stub) {
    file << (kernel.launched ? "launched " : "held ") << PlainName(kernel.name) << "\n";
  }
}

void CountLaunch(const void* stub) {
  Kernels& kernels = AllKernels();
  std::lock_guard lock(kernels.mutex);
  if (const auto found = kernels.by_stub.find(stub); found != kernels.by_stub.end()) {
    found->second.launched = true;
  }
}

}  // namespace

extern "C" {

// What nvcc's code calls for each kernel when the program starts.
void RealRegister(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*,
                  int*) asm("__real___cudaRegisterFunction");
void WrappedRegister(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*, dim3*,
                     int*) asm("__wrap___cudaRegisterFunction");
void WrappedRegister(void** binary, const char* stub, char* function, const char* name, int limit,
                     uint3* thread, uint3* block, dim3* threads, dim3* blocks, int* warp_size) {
  {
    static const int at_exit = std::atexit(WriteNames);
    (void)at_exit;
    Kernels& kernels = AllKernels();
    std::lock_guard lock(kernels.mutex);
    kernels.by_stub[stub].name = name;
  }
  RealRegister(binary, stub, function, name, limit, thread, block, threads, blocks, warp_size);
}

#if CUDART_VERSION >= 13000
// The first launch written as <<<>>> of each place; earlier compilers call what comes below.
cudaError_t RealGetKernel(cudaKernel_t*, const void*) asm("__real___cudaGetKernel");
cudaError_t WrappedGetKernel(cudaKernel_t*, const void*) asm("__wrap___cudaGetKernel");
cudaError_t WrappedGetKernel(cudaKernel_t* kernel, const void* stub) {
  CountLaunch(stub);
  return RealGetKernel(kernel, stub);
}
#endif

cudaError_t RealLaunch(const void*, dim3, dim3, void**, size_t,
                       cudaStream_t) asm("__real_cudaLaunchKernel");
cudaError_t WrappedLaunch(const void*, dim3, dim3, void**, size_t,
                          cudaStream_t) asm("__wrap_cudaLaunchKernel");
cudaError_t WrappedLaunch(const void* stub, dim3 blocks, dim3 threads, void** args,
                          size_t shared_bytes, cudaStream_t stream) {
  CountLaunch(stub);
  return RealLaunch(stub, blocks, threads, args, shared_bytes, stream);
}

cudaError_t RealLaunchEx(const cudaLaunchConfig_t*, const void*,
                         void**) asm("__real_cudaLaunchKernelExC");
cudaError_t WrappedLaunchEx(const cudaLaunchConfig_t*, const void*,
                            void**) asm("__wrap_cudaLaunchKernelExC");
cudaError_t WrappedLaunchEx(const cudaLaunchConfig_t* config, const void* stub, void** args) {
  CountLaunch(stub);
  return RealLaunchEx(config, stub, args);
}

}  // extern "C"
