#include "engine/device/cuda/cuda_device.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "engine/base/cpu_features.h"
#include "engine/base/log.h"
#include "engine/base/status_macros.h"
#include "engine/base/units.h"
#include "engine/device/cuda/stream_queue.h"

namespace writescope::device {
namespace {

constexpr int64_t kPageBytes = 4096;
constexpr int64_t kHugePageBytes = 2 * kMiB;
// cudaMalloc gives out whole units of this size.
constexpr int64_t kDeviceUnitBytes = 2 * kMiB;
constexpr int64_t kArgumentRingBytes = 16 * kMaxArgumentBytes;
// Below this much, touching memory with one thread is as fast.
constexpr int64_t kTouchAloneBytes = 64 * kMiB;

// What a host allocation takes of the budget: whole pages. The kernel puts huge ones where they
// fit.
int64_t MappedBytes(int64_t size_bytes) { return RoundUp(size_bytes, kPageBytes); }

// Tools under which a kernel that waits for the CPU can wait for ever, since they let the host go
// on only when a launch has ended.
std::string SerialisingTool() {
  if (const char* value = std::getenv("CUDA_LAUNCH_BLOCKING");
      value != nullptr && std::strcmp(value, "0") != 0) {
    return "CUDA_LAUNCH_BLOCKING";
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (absl::StrContains(line, "compute-sanitizer") || absl::StrContains(line, "libsanitizer")) {
      return "compute-sanitizer";
    }
    if (absl::StrContains(line, "nsight-compute")) return "a kernel profiler";
  }
  return "";
}

absl::StatusOr<StreamMemoryOps> FindStreamMemoryOps() {
  StreamMemoryOps ops;
  cudaDriverEntryPointQueryResult found;
  const auto find = [&](const char* name, void** to) -> absl::Status {
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion(name, to, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || *to == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("the CUDA driver does not offer ", name, "; driver 525 or later has it"));
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(find("cuStreamWriteValue64", reinterpret_cast<void**>(&ops.write64)));
  RETURN_IF_ERROR(find("cuStreamWaitValue64", reinterpret_cast<void**>(&ops.wait64)));
  return ops;
}

absl::StatusOr<CudaInfo> Inspect(int ordinal) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    return absl::NotFoundError(
        absl::StrCat("no CUDA device: ",
                     error == cudaSuccess ? "the driver lists none" : cudaGetErrorString(error),
                     "; --device=cpu runs without one"));
  }
  if (ordinal < 0 || ordinal >= count) {
    return absl::NotFoundError(
        absl::StrCat("CUDA device ", ordinal, " of ", count, " does not exist"));
  }
  cudaDeviceProp properties;
  RETURN_IF_ERROR(CudaStatus(cudaGetDeviceProperties(&properties, ordinal), "device properties"));
  int uses_host_pointers = 0;
  RETURN_IF_ERROR(
      CudaStatus(cudaDeviceGetAttribute(&uses_host_pointers,
                                        cudaDevAttrCanUseHostPointerForRegisteredMem, ordinal),
                 "device attribute"));
  if (uses_host_pointers == 0 || properties.canMapHostMemory == 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        properties.name, " cannot read page-locked host memory at the host's own addresses"));
  }
  CudaInfo info{.name = properties.name,
                .compute_major = properties.major,
                .compute_minor = properties.minor,
                .num_multiprocessors = properties.multiProcessorCount,
                .total_bytes = static_cast<int64_t>(properties.totalGlobalMem)};
  if (info.compute_major < 7 || (info.compute_major == 7 && info.compute_minor < 5)) {
    return absl::FailedPreconditionError(absl::StrCat(info.name, " has compute capability ",
                                                      info.compute_major, ".", info.compute_minor,
                                                      "; this build's kernels need 7.5"));
  }
  if (cudaDeviceGetAttribute(&info.numa_node, cudaDevAttrHostNumaId, ordinal) != cudaSuccess) {
    info.numa_node = -1;
    cudaGetLastError();
  }
  return info;
}

void TouchInParallel(std::byte* data, int64_t size_bytes) {
  if (size_bytes < kTouchAloneBytes) {
    std::memset(data, 0, static_cast<size_t>(size_bytes));
    return;
  }
  const int64_t num_threads = std::max(1, UsableCores());
  const int64_t part = RoundUp(CeilDiv(size_bytes, num_threads), kHugePageBytes);
  std::vector<std::thread> threads;
  for (int64_t first = 0; first < size_bytes; first += part) {
    threads.emplace_back([=] {
      std::memset(data + first, 0, static_cast<size_t>(std::min(part, size_bytes - first)));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

class CudaDeviceImpl final : public CudaDevice {
 public:
  CudaDeviceImpl(const CudaDeviceOptions& options, CudaInfo info)
      : options_(options), info_(std::move(info)) {}

  absl::Status Init() {
    RETURN_IF_ERROR(CudaStatus(cudaSetDevice(options_.ordinal), "cudaSetDevice"));
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo"));
    flag_waits_ = options_.flag_waits;
    if (flag_waits_ == FlagWaits::kAuto) {
      const std::string tool = SerialisingTool();
      flag_waits_ = tool.empty() ? FlagWaits::kStream : FlagWaits::kCaller;
      if (!tool.empty()) {
        Log(LogLevel::kWarning,
            "the GPU is serialised; steps wait for the CPU on the host, which is slower",
            {{"by", tool}});
      }
    }
    ASSIGN_OR_RETURN(const StreamMemoryOps ops, FindStreamMemoryOps());
    RETURN_IF_ERROR(CudaStatus(clock_.Init(), "device clock"));
    RETURN_IF_ERROR(compute_.Init(ops, flag_waits_, kArgumentRingBytes, /*is_awaited=*/false));
    RETURN_IF_ERROR(upload_.Init(ops, flag_waits_, 0, /*is_awaited=*/true));
    RETURN_IF_ERROR(download_.Init(ops, flag_waits_, 0, /*is_awaited=*/false));
    RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo"));
    // Whatever else runs on the GPU is counted too: that memory is not there for us either way.
    info_.context_bytes = static_cast<int64_t>(total_bytes - free_bytes);
    used_bytes_ = info_.context_bytes;
    if (options_.budget_bytes > static_cast<int64_t>(total_bytes)) {
      return absl::ResourceExhaustedError(absl::StrCat("a VRAM budget of ", options_.budget_bytes,
                                                       " bytes on ", info_.name, ", which has ",
                                                       total_bytes));
    }
    if (info_.context_bytes > options_.budget_bytes) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "a VRAM budget of ", options_.budget_bytes, " bytes; the CUDA context, and what else ",
          "runs on ", info_.name, ", take ", info_.context_bytes, " already"));
    }
    return absl::OkStatus();
  }

  ~CudaDeviceImpl() override {
    for (StreamQueue* queue : {&compute_, &upload_, &download_}) {
      if (queue->stream() != nullptr) cudaStreamSynchronize(queue->stream());
    }
  }

  std::string name() const override { return "cuda"; }
  std::string description() const override { return info_.name; }

  absl::StatusOr<Buffer> AllocateDevice(int64_t size_bytes, std::string_view label) override {
    if (size_bytes <= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("device memory for ", std::string(label), ": ", size_bytes, " bytes"));
    }
    const int64_t taken = RoundUp(size_bytes, kDeviceUnitBytes);
    std::lock_guard lock(mutex_);
    if (used_bytes_ + taken > options_.budget_bytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat("device memory for ", std::string(label), " needs ", taken, " bytes; ",
                       options_.budget_bytes - used_bytes_, " of the budget of ",
                       options_.budget_bytes, " bytes are left"));
    }
    void* data = nullptr;
    RETURN_IF_ERROR(
        CudaStatus(cudaMalloc(&data, static_cast<size_t>(taken)),
                   absl::StrCat(taken, " bytes of device memory for ", std::string(label))));
    RETURN_IF_ERROR(CudaStatus(cudaMemset(data, 0, static_cast<size_t>(taken)), "cudaMemset"));
    // Streams that do not wait for the default one may use it at once.
    RETURN_IF_ERROR(CudaStatus(cudaDeviceSynchronize(), "cudaDeviceSynchronize"));
    used_bytes_ += taken;
    return Buffer(static_cast<std::byte*>(data), size_bytes, &CudaDeviceImpl::ReleaseDevice, this);
  }

  absl::StatusOr<Buffer> AllocateHost(int64_t size_bytes, HostMemory kind,
                                      std::string_view label) override {
    if (size_bytes <= 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("host memory for ", std::string(label), ": ", size_bytes, " bytes"));
    }
    const int64_t mapped = MappedBytes(size_bytes);
    std::lock_guard lock(mutex_);
    if (options_.host_budget_bytes > 0 && host_used_bytes_ + mapped > options_.host_budget_bytes) {
      return absl::ResourceExhaustedError(
          absl::StrCat("host memory for ", std::string(label), " needs ", mapped, " bytes; ",
                       options_.host_budget_bytes - host_used_bytes_, " of the budget of ",
                       options_.host_budget_bytes, " bytes are left"));
    }
    void* data = mmap(nullptr, static_cast<size_t>(mapped), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) {
      return absl::ResourceExhaustedError(
          absl::StrCat("cannot map ", mapped, " bytes of host memory for ", std::string(label),
                       ": ", std::strerror(errno)));
    }
    madvise(data, static_cast<size_t>(mapped), MADV_HUGEPAGE);
    TouchInParallel(static_cast<std::byte*>(data), mapped);
    const cudaError_t locked = cudaHostRegister(data, static_cast<size_t>(mapped),
                                                cudaHostRegisterPortable | cudaHostRegisterMapped);
    if (locked != cudaSuccess) {
      cudaGetLastError();
      // Only the CPU reads the host region; copies to it may go by way of the driver's own buffers.
      if (kind == HostMemory::kPageLocked && !options_.allow_pageable) {
        munmap(data, static_cast<size_t>(mapped));
        return absl::ResourceExhaustedError(absl::StrCat(
            "cannot page-lock ", mapped, " bytes of host memory for ", std::string(label), ": ",
            cudaGetErrorString(locked),
            ". Raise the memlock limit (ulimit -l), lower --host-budget, or go on with "
            "--allow-pageable, at a fraction of the link's speed"));
      }
      pageable_bytes_ += mapped;
      Log(LogLevel::kWarning, "host memory is not page-locked",
          {{"for", std::string(label)}, {"bytes", absl::StrCat(mapped)}});
    }
    host_used_bytes_ += mapped;
    return Buffer(
        static_cast<std::byte*>(data), size_bytes,
        locked == cudaSuccess ? &CudaDeviceImpl::ReleaseLocked : &CudaDeviceImpl::ReleasePageable,
        this);
  }

  int64_t device_budget_bytes() const override { return options_.budget_bytes; }
  int64_t device_used_bytes() const override {
    std::lock_guard lock(mutex_);
    return used_bytes_;
  }
  CudaQueue& compute() override { return compute_; }
  CudaQueue& upload() override { return upload_; }
  CudaQueue& download() override { return download_; }
  LinkInfo link() const override { return {}; }
  absl::Status SetLinkPace(double) override {
    return absl::FailedPreconditionError(
        "the link of a CUDA device is real: it has no pace to set");
  }
  const CudaInfo& info() const override { return info_; }
  FlagWaits flag_waits() const override { return flag_waits_; }
  int64_t pageable_bytes() const override {
    std::lock_guard lock(mutex_);
    return pageable_bytes_;
  }

 private:
  static void ReleaseDevice(void* context, std::byte* data, int64_t size_bytes) {
    auto* device = static_cast<CudaDeviceImpl*>(context);
    cudaFree(data);
    std::lock_guard lock(device->mutex_);
    device->used_bytes_ -= RoundUp(size_bytes, kDeviceUnitBytes);
  }
  static void ReleaseLocked(void* context, std::byte* data, int64_t size_bytes) {
    cudaHostUnregister(data);
    Unmap(context, data, size_bytes);
  }
  static void ReleasePageable(void* context, std::byte* data, int64_t size_bytes) {
    auto* device = static_cast<CudaDeviceImpl*>(context);
    {
      std::lock_guard lock(device->mutex_);
      device->pageable_bytes_ -= MappedBytes(size_bytes);
    }
    Unmap(context, data, size_bytes);
  }
  static void Unmap(void* context, std::byte* data, int64_t size_bytes) {
    auto* device = static_cast<CudaDeviceImpl*>(context);
    const int64_t mapped = MappedBytes(size_bytes);
    munmap(data, static_cast<size_t>(mapped));
    std::lock_guard lock(device->mutex_);
    device->host_used_bytes_ -= mapped;
  }

  const CudaDeviceOptions options_;
  CudaInfo info_;
  FlagWaits flag_waits_ = FlagWaits::kStream;
  DeviceClock clock_;
  StreamQueue compute_{"compute", clock_};
  StreamQueue upload_{"upload", clock_};
  StreamQueue download_{"download", clock_};
  mutable std::mutex mutex_;
  int64_t used_bytes_ = 0;  // Guarded by mutex_, like the two below
  int64_t host_used_bytes_ = 0;
  int64_t pageable_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<CudaDevice>> CudaDevice::Create(const CudaDeviceOptions& options) {
  if (options.budget_bytes <= 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a device memory budget of ", options.budget_bytes, " bytes"));
  }
  ASSIGN_OR_RETURN(CudaInfo info, Inspect(options.ordinal));
  auto device = std::make_unique<CudaDeviceImpl>(options, std::move(info));
  RETURN_IF_ERROR(device->Init());
  return device;
}

}  // namespace writescope::device
