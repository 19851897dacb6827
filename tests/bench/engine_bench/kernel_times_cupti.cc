// The library is opened when it is asked for, so that the benchmark runs without it.
#if WRITESCOPE_WITH_CUPTI
#include <cuda.h>
#include <cupti.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdlib>
#include <mutex>
#endif

#include "absl/strings/str_cat.h"
#include "engine/base/status_macros.h"
#include "tests/bench/engine_bench/kernel_times.h"

namespace writescope::bench {

#if WRITESCOPE_WITH_CUPTI
namespace {

constexpr size_t kBufferBytes = size_t{4} << 20;
constexpr size_t kBufferAlignment = 8;

struct Library {
  decltype(&cuptiActivityRegisterCallbacks) register_callbacks = nullptr;
  decltype(&cuptiActivityEnable) enable = nullptr;
  decltype(&cuptiActivityDisable) disable = nullptr;
  decltype(&cuptiActivityFlushAll) flush_all = nullptr;
  decltype(&cuptiActivityGetNextRecord) next_record = nullptr;
  decltype(&cuptiGetResultString) result_string = nullptr;
};

// The callbacks have no argument of ours.
struct State {
  Library library;
  std::mutex mutex;
  std::vector<KernelSpan> spans;
};
State& TheState() {
  static State state;
  return state;
}

// "kernel<...>(...)" without namespaces and arguments.
std::string ShortName(const char* mangled) {
  int status = 0;
  char* demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
  std::string name = status == 0 ? demangled : mangled;
  std::free(demangled);
  const size_t arguments = name.find("Kernel");
  const size_t end = arguments == std::string::npos ? std::string::npos : name.find('(', arguments);
  name = name.substr(0, end);
  const size_t begin = name.rfind("::", name.find("Kernel"));
  return begin == std::string::npos ? name : name.substr(begin + 2);
}

void CUPTIAPI RequestBuffer(uint8_t** buffer, size_t* size_bytes, size_t* max_records) {
  *buffer = static_cast<uint8_t*>(std::aligned_alloc(kBufferAlignment, kBufferBytes));
  *size_bytes = kBufferBytes;
  *max_records = 0;
}

void CUPTIAPI TakeBuffer(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t valid_bytes) {
  State& state = TheState();
  const std::lock_guard lock(state.mutex);
  CUpti_Activity* record = nullptr;
  while (state.library.next_record(buffer, valid_bytes, &record) == CUPTI_SUCCESS) {
    if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) continue;
    const auto* kernel = reinterpret_cast<const CUpti_ActivityKernel10*>(record);
    state.spans.push_back({ShortName(kernel->name), static_cast<int64_t>(kernel->start),
                           static_cast<int64_t>(kernel->end), kernel->correlationId});
  }
  std::free(buffer);
}

absl::Status CuptiStatus(CUptiResult result, const char* what) {
  if (result == CUPTI_SUCCESS) return absl::OkStatus();
  const char* text = "unknown";
  TheState().library.result_string(result, &text);
  return absl::InternalError(absl::StrCat("CUPTI: ", what, ": ", text));
}

class CuptiKernelTimes final : public KernelTimes {
 public:
  absl::Status Begin() override {
    TheState().spans.clear();
    return CuptiStatus(TheState().library.enable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL),
                       "begin of a record");
  }
  absl::StatusOr<std::vector<KernelSpan>> End() override {
    const Library& library = TheState().library;
    RETURN_IF_ERROR(CuptiStatus(library.flush_all(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), "flush"));
    RETURN_IF_ERROR(
        CuptiStatus(library.disable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL), "end of a record"));
    const std::lock_guard lock(TheState().mutex);
    return std::move(TheState().spans);
  }
};

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

}  // namespace

absl::StatusOr<std::unique_ptr<KernelTimes>> KernelTimes::Create() {
  const std::string name = absl::StrCat("libcupti.so.", CUDA_VERSION / 1000);
  void* handle = dlopen(name.c_str(), RTLD_NOW);
  if (handle == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("kernel times need ", name,
                     ", which comes with the CUDA toolkit (extras/CUPTI): ", dlerror()));
  }
  Library& library = TheState().library;
  if (!Find(handle, "cuptiActivityRegisterCallbacks", &library.register_callbacks) ||
      !Find(handle, "cuptiActivityEnable", &library.enable) ||
      !Find(handle, "cuptiActivityDisable", &library.disable) ||
      !Find(handle, "cuptiActivityFlushAll", &library.flush_all) ||
      !Find(handle, "cuptiActivityGetNextRecord", &library.next_record) ||
      !Find(handle, "cuptiGetResultString", &library.result_string)) {
    return absl::NotFoundError(absl::StrCat(name, " lacks a function"));
  }
  RETURN_IF_ERROR(
      CuptiStatus(library.register_callbacks(&RequestBuffer, &TakeBuffer), "callbacks"));
  return std::make_unique<CuptiKernelTimes>();
}

#else

absl::StatusOr<std::unique_ptr<KernelTimes>> KernelTimes::Create() {
  return absl::UnimplementedError(
      "this program was built without CUPTI, which kernel times need: its header comes with the "
      "CUDA toolkit (extras/CUPTI)");
}

#endif

}  // namespace writescope::bench
