// Counts the instructions that this thread executes below functions of some libraries, with no
// counter of the hardware. Their memory is made not executable, so that a call into them faults;
// from there the trap flag stops the thread after each instruction until the call has returned.
#include <csignal>
#include <cstdint>
#include <sys/mman.h>
#include <ucontext.h>

namespace {

struct Range {
  uintptr_t begin, end;
};
constexpr int MOST = 64, TRAP_FLAG = 0x100;
Range ranges[MOST];
int known = 0;
uint64_t counted = 0;
uintptr_t entry = 0;  // the stack when a library was entered; 0: outside
struct sigaction fault_before, trap_before;

bool within(uintptr_t at) {
  for (int i = 0; i < known; ++i)
    if (at - ranges[i].begin < ranges[i].end - ranges[i].begin) return true;
  return false;
}

void protect(int how) {
  for (int i = 0; i < known; ++i)
    mprotect(reinterpret_cast<void*>(ranges[i].begin), ranges[i].end - ranges[i].begin, how);
}

void on_fault(int, siginfo_t*, void* context) {
  auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  if (entry || !within(registers[REG_RIP])) {  // a fault of the kernel's own: it comes again
    sigaction(SIGSEGV, &fault_before, nullptr);
    return;
  }
  entry = registers[REG_RSP];
  protect(PROT_READ | PROT_EXEC);
  registers[REG_EFL] |= TRAP_FLAG;
}

void on_trap(int, siginfo_t*, void* context) {
  auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  ++counted;
  if (static_cast<uintptr_t>(registers[REG_RSP]) <= entry) return;
  entry = 0;  // it has returned
  registers[REG_EFL] &= ~TRAP_FLAG;
  protect(PROT_READ);
}

void handle(int signal, void (*handler)(int, siginfo_t*, void*), struct sigaction* before) {
  struct sigaction action = {};
  action.sa_sigaction = handler;
  action.sa_flags = SA_SIGINFO;
  sigaction(signal, &action, before);
}

}  // namespace

extern "C" {

// Executable memory of a library; 0 where there are too many.
int stepping_range(uintptr_t begin, uintptr_t end) {
  if (known == MOST) return 0;
  ranges[known++] = {begin, end};
  return 1;
}

void stepping_begin() {
  counted = entry = 0;
  handle(SIGSEGV, on_fault, &fault_before);
  handle(SIGTRAP, on_trap, &trap_before);
  protect(PROT_READ);
}

uint64_t stepping_end() {
  protect(PROT_READ | PROT_EXEC);
  sigaction(SIGSEGV, &fault_before, nullptr);
  sigaction(SIGTRAP, &trap_before, nullptr);
  known = 0;
  return counted;
}
}
