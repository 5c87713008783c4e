// Memory that is used again: fresh memory takes longer to be mapped than to be filled.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace hicache {

// Gives objects that come back once nobody has them any more; from any thread to any thread.
template <typename T>
class Recycler : public std::enable_shared_from_this<Recycler<T>> {
 public:
  // let_go: makes an object that comes back keep nothing else alive.
  explicit Recycler(void (*let_go)(T&)) : let_go_(let_go) {}

  // But for that, as whoever had it last left it.
  std::shared_ptr<T> take() {
    std::unique_ptr<T> object;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        object = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (object == nullptr) {
      object = std::make_unique<T>();
    }
    const auto self = this->shared_from_this();
    return {object.release(), [self](T* back) { self->give_back(std::unique_ptr<T>(back)); }};
  }

 private:
  static constexpr std::size_t kMax = 8;

  void give_back(std::unique_ptr<T> object) {
    let_go_(*object);
    // In a forked child the lock may be held for ever.
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (lock.owns_lock() && free_.size() < kMax) {
      free_.push_back(std::move(object));
    }
  }

  void (*const let_go_)(T&);
  std::mutex mutex_;
  std::vector<std::unique_ptr<T>> free_;
};

}  // namespace hicache
