// What the kernel has an event loop wait for. Threads: every function may be called on any thread.
#pragma once

namespace hicache {

class Bell {
 public:
  ~Bell();
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;
  int fd() const { return fd_; }  // readable while it has rung

 protected:
  Bell(int fd, const char* what);  // throws std::system_error where the kernel gave none

 private:
  const int fd_;
};

// Rings when somebody rings it.
class Doorbell : public Bell {
 public:
  Doorbell();
  void ring();
  void silence();  // what was rung so far is heard
};

// Rings some time after it was set, until it is set again or unset; nobody is woken by the setting.
class Alarm : public Bell {
 public:
  Alarm();
  void set(double seconds);
  void unset();
};

}  // namespace hicache
