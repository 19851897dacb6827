#include "tests/bench/link_load.h"

#include <dlfcn.h>

#include <cstring>
#include <vector>

namespace writescope::bench {
namespace {

constexpr int64_t kCopyBytes = int64_t{2} << 20;
constexpr int kInFlight = 2;

// The few functions of the CUDA runtime that are needed, with their published types.
struct CudaRuntime {
  int (*get_device_count)(int*) = nullptr;
  int (*host_register)(void*, size_t, unsigned) = nullptr;
  int (*host_unregister)(void*) = nullptr;
  int (*malloc)(void**, size_t) = nullptr;
  int (*free)(void*) = nullptr;
  int (*stream_create)(void**) = nullptr;
  int (*stream_synchronize)(void*) = nullptr;
  int (*memcpy_async)(void*, const void*, size_t, int, void*) = nullptr;

  bool Load() {
    void* library = nullptr;
    for (const char* name :
         {"libcudart.so", "libcudart.so.13", "/usr/local/cuda/lib64/libcudart.so"}) {
      if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    }
    if (library == nullptr) return false;
    bool complete = true;
    const auto find = [&](const char* name, auto& function) {
      void* symbol = dlsym(library, name);
      complete = complete && symbol != nullptr;
      std::memcpy(&function, &symbol, sizeof(symbol));
    };
    find("cudaGetDeviceCount", get_device_count);
    find("cudaHostRegister", host_register);
    find("cudaHostUnregister", host_unregister);
    find("cudaMalloc", malloc);
    find("cudaFree", free);
    find("cudaStreamCreate", stream_create);
    find("cudaStreamSynchronize", stream_synchronize);
    find("cudaMemcpyAsync", memcpy_async);
    int count = 0;
    return complete && get_device_count(&count) == 0 && count > 0;
  }
};

}  // namespace

class LinkLoad::Copier {
 public:
  virtual ~Copier() = default;
  virtual std::string_view kind() const = 0;
  // Copies kCopyBytes; returns when that copy or an earlier one has ended.
  virtual void Copy(const std::byte* from) = 0;
  virtual void Drain() = 0;
};

class LinkLoad::CudaCopier : public Copier {
 public:
  // Null where there is no device, or the memory cannot be page-locked.
  static std::unique_ptr<Copier> Create(std::byte* memory, int64_t size_bytes) {
    auto copier = std::unique_ptr<CudaCopier>(new CudaCopier);
    CudaRuntime& cuda = copier->cuda_;
    if (!cuda.Load()) return nullptr;
    if (cuda.malloc(&copier->device_, kInFlight * kCopyBytes) != 0) return nullptr;
    for (void*& stream : copier->streams_) {
      if (cuda.stream_create(&stream) != 0) return nullptr;
    }
    if (cuda.host_register(memory, static_cast<size_t>(size_bytes), 0) != 0) return nullptr;
    copier->registered_ = memory;
    return copier;
  }
  ~CudaCopier() override {
    if (registered_ != nullptr) cuda_.host_unregister(registered_);
    if (device_ != nullptr) cuda_.free(device_);
  }
  std::string_view kind() const override { return "device"; }
  void Copy(const std::byte* from) override {
    constexpr int kHostToDevice = 1;
    const int slot = next_++ % kInFlight;
    cuda_.stream_synchronize(streams_[slot]);
    cuda_.memcpy_async(static_cast<std::byte*>(device_) + slot * kCopyBytes, from, kCopyBytes,
                       kHostToDevice, streams_[slot]);
  }
  void Drain() override {
    for (void* stream : streams_) cuda_.stream_synchronize(stream);
  }

 private:
  CudaRuntime cuda_;
  void* device_ = nullptr;
  void* streams_[kInFlight] = {};
  void* registered_ = nullptr;
  int next_ = 0;
};

class LinkLoad::MemoryCopier : public Copier {
 public:
  std::string_view kind() const override { return "memory"; }
  void Copy(const std::byte* from) override { std::memcpy(to_.data(), from, kCopyBytes); }
  void Drain() override {}

 private:
  std::vector<std::byte> to_ = std::vector<std::byte>(kCopyBytes);
};

LinkLoad::LinkLoad(std::byte* memory, int64_t size_bytes)
    : memory_(memory), size_bytes_(size_bytes), copier_(CudaCopier::Create(memory, size_bytes)) {
  if (copier_ == nullptr) copier_ = std::make_unique<MemoryCopier>();
}

LinkLoad::~LinkLoad() {
  if (thread_.joinable()) StopAndGetBytes();
}

std::string_view LinkLoad::kind() const { return copier_->kind(); }

void LinkLoad::Start() {
  stop_.store(false);
  bytes_.store(0);
  thread_ = std::thread([this] {
    // From the end: the readers begin at the front, and no side is to find the other's lines
    // cached.
    for (int64_t at = size_bytes_ - kCopyBytes; !stop_.load(std::memory_order_relaxed);) {
      copier_->Copy(memory_ + at);
      bytes_.fetch_add(kCopyBytes, std::memory_order_relaxed);
      at = at >= kCopyBytes ? at - kCopyBytes : size_bytes_ - kCopyBytes;
    }
    copier_->Drain();
  });
}

double LinkLoad::StopAndGetBytes() {
  const int64_t bytes = bytes_.load();
  stop_.store(true);
  thread_.join();
  return static_cast<double>(bytes);
}

}  // namespace writescope::bench
