// Keeps the link to an accelerator busy with copies from host memory, as the link pump does.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <thread>

namespace writescope::bench {

// By the CUDA runtime where one can be loaded and there is a device: no build of this program needs
// one. Else by a thread that copies in memory, which is slower and takes a core.
class LinkLoad {
 public:
  // `memory` outlives this and is page-locked meanwhile, where there is a device.
  LinkLoad(std::byte* memory, int64_t size_bytes);
  ~LinkLoad();
  LinkLoad(const LinkLoad&) = delete;
  LinkLoad& operator=(const LinkLoad&) = delete;

  std::string_view kind() const;  // "device" or "memory"
  void Start();
  // Of copies that ended since Start().
  double StopAndGetBytes();

 private:
  class Copier;
  class CudaCopier;
  class MemoryCopier;

  std::byte* const memory_;
  const int64_t size_bytes_;
  std::unique_ptr<Copier> copier_;
  std::atomic<bool> stop_{false};
  std::atomic<int64_t> bytes_{0};
  std::thread thread_;
};

}  // namespace writescope::bench
