#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/sim/simulated_worker.h"

namespace writescope::sim {
namespace {

// One decode step as fluid flow between events. Each layer: dense work, then attention in which CPU
// and link work on the layer until its bytes are done. The link may go ahead to later layers as far
// as the ring has room.
class StepRun {
 public:
  StepRun(const Machine& machine, const Workload& workload, double share, bool meet)
      : m_(machine), w_(workload) {
    const double bytes = workload.spilled_bytes / machine.num_layers;
    const double host = bytes * workload.host_fraction;
    const double stream = bytes * workload.stream_fraction;
    Layer layer;
    if (meet) {
      layer = {host, stream, bytes - host - stream, 0};
    } else {
      const double cpu = std::clamp(share * bytes, host, std::max(host, bytes - stream));
      layer = {cpu, bytes - cpu, 0, 0};
    }
    layers_.assign(static_cast<size_t>(machine.num_layers), layer);
  }

  controller::StepSample Run() {
    const double dense =
        m_.dense_per_layer + m_.dense_per_layer_and_sequence * static_cast<double>(w_.batch_size);
    for (current_ = 0; current_ < layers_.size(); ++current_) {
      const double dense_end = now_ + dense;
      while (now_ < dense_end) Advance(dense_end - now_, false);
      now_ = dense_end;
      // The query is here: what has landed of this layer is read, and its room in the ring is free.
      landed_ahead_ = std::max(0.0, landed_ahead_ - layers_[current_].streamed);
      const double attention_start = now_;
      const bool cpu_part = layers_[current_].cpu + layers_[current_].pool > kRest;
      while (Left(layers_[current_]) > kRest) Advance(kForever, true);
      const Layer& layer = layers_[current_];
      const double device_seconds =
          (w_.resident_bytes / m_.num_layers + layer.streamed) / m_.device;
      device_seconds_ += device_seconds;
      now_ = std::max(now_, attention_start + device_seconds);
      if (cpu_part) now_ += m_.handoff_per_layer;
    }
    return Sample(dense);
  }

 private:
  struct Layer {
    double cpu = 0;
    double link = 0;
    double pool = 0;  // Either side's.
    double streamed = 0;
  };
  static constexpr double kRest = 1e-3;  // Bytes: rounding.
  static constexpr double kForever = std::numeric_limits<double>::infinity();

  static double Left(const Layer& layer) { return layer.cpu + layer.link + layer.pool; }
  // Whether what lands of layer `l` waits in the ring for its query.
  bool Ahead(size_t l, bool query) const { return l > current_ || !query; }

  // The first layer with work for the link that the ring has room for; none is layers_.size().
  size_t LinkLayer(bool query) const {
    for (size_t l = current_; l < layers_.size(); ++l) {
      if (layers_[l].link + layers_[l].pool <= kRest) continue;
      if (Ahead(l, query) && landed_ahead_ >= m_.ring_bytes - kRest) return layers_.size();
      return l;
    }
    return layers_.size();
  }

  // Until the next event, at most `limit` seconds.
  void Advance(double limit, bool query) {
    Layer& here = layers_[current_];
    const size_t link_layer = LinkLayer(query);
    const bool cpu_on = query && here.cpu + here.pool > kRest;
    const bool link_on = link_layer < layers_.size();
    if (!cpu_on && !link_on) {
      now_ += limit;
      return;
    }
    const double cpu_rate = cpu_on ? (link_on ? m_.cpu_with_link : m_.cpu_alone) : 0;
    const double link_rate = link_on ? (cpu_on ? m_.link_with_cpu : m_.link_alone) : 0;
    double dt = limit;
    const bool share_pool = cpu_on && link_on && link_layer == current_ && here.pool > kRest &&
                            here.cpu <= kRest && here.link <= kRest;
    if (share_pool) {
      dt = std::min(dt, here.pool / (cpu_rate + link_rate));
    } else {
      if (cpu_on) dt = std::min(dt, (here.cpu > kRest ? here.cpu : here.pool) / cpu_rate);
      if (link_on) dt = std::min(dt, LinkChunk(link_layer, query) / link_rate);
    }
    if (cpu_on) Take(here, cpu_rate * dt, true);
    if (link_on) {
      Take(layers_[link_layer], link_rate * dt, false);
      if (Ahead(link_layer, query)) landed_ahead_ += link_rate * dt;
    }
    now_ += dt;
    if (cpu_on) cpu_busy_ += dt, cpu_bytes_ += cpu_rate * dt;
    if (link_on) link_busy_ += dt, link_bytes_ += link_rate * dt;
    if (cpu_on && link_on) {
      both_ += dt, cpu_both_ += cpu_rate * dt, link_both_ += link_rate * dt;
    }
  }

  double LinkChunk(size_t l, bool query) const {
    const double left = layers_[l].link > kRest ? layers_[l].link : layers_[l].pool;
    return Ahead(l, query) ? std::min(left, m_.ring_bytes - landed_ahead_) : left;
  }

  void Take(Layer& layer, double bytes, bool by_cpu) {
    double& own = by_cpu ? layer.cpu : layer.link;
    double& from = own > kRest ? own : layer.pool;
    from = std::max(0.0, from - bytes);
    if (!by_cpu) layer.streamed += bytes;
  }

  controller::StepSample Sample(double dense) const {
    const auto whole = [](double bytes) { return static_cast<uint64_t>(std::llround(bytes)); };
    controller::StepSample s;
    s.step_seconds = now_;
    s.batch_size = w_.batch_size;
    s.spilled_bytes = whole(w_.spilled_bytes);
    s.stream_region_bytes = whole(w_.spilled_bytes * w_.stream_fraction);
    s.host_region_bytes = whole(w_.spilled_bytes * w_.host_fraction);
    s.cpu_bytes = whole(cpu_bytes_);
    s.link_bytes = whole(link_bytes_);
    s.resident_bytes = whole(w_.resident_bytes);
    s.cpu_busy_seconds = cpu_busy_;
    s.link_busy_seconds = link_busy_;
    s.both_busy_seconds = both_;
    // As of a worker that cannot tell dense work from waiting for the link where the CPU has no
    // query. The engine can; the controller does not rely on it.
    s.dense_seconds =
        cpu_bytes_ > 0 ? dense * m_.num_layers : std::max(0.0, now_ - device_seconds_);
    s.device_attention_seconds = device_seconds_;
    s.cpu_bytes_both_busy = std::min(s.cpu_bytes, whole(cpu_both_));
    s.link_bytes_both_busy = std::min(s.link_bytes, whole(link_both_));
    s.observed_cpu_share = w_.spilled_bytes > 0 ? cpu_bytes_ / w_.spilled_bytes : 0;
    return s;
  }

  const Machine& m_;
  const Workload& w_;
  std::vector<Layer> layers_;
  size_t current_ = 0;
  double now_ = 0;
  double landed_ahead_ = 0;
  double cpu_busy_ = 0, link_busy_ = 0, both_ = 0;
  double cpu_bytes_ = 0, link_bytes_ = 0, cpu_both_ = 0, link_both_ = 0;
  double device_seconds_ = 0;
};

}  // namespace

controller::StepSample RunStep(const Machine& machine, const Workload& workload, double share,
                               bool meet) {
  return StepRun(machine, workload, share, meet).Run();
}

KnownBest FindBest(const Machine& machine, const Workload& workload) {
  KnownBest best = {0, std::numeric_limits<double>::infinity()};
  for (int i = 0; i <= 400; ++i) {
    const double share = i / 400.0;
    if (share < workload.host_fraction || share > 1 - workload.stream_fraction) continue;
    const double seconds = RunStep(machine, workload, share).step_seconds;
    if (seconds < best.step_seconds) best = {share, seconds};
  }
  return best;
}

}  // namespace writescope::sim
