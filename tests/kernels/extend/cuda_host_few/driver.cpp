// Runs whole programs of extend/cuda/few.cu on the host: three warpgroups of threads with products of their own.
#define HOST_WARPS 12
#include "hopper.cuh"
#include "products.cuh"
#include "constants.h"
#include "few.cu"

const Arguments* arguments;

void body() {
  extend(*arguments);
  threads[threadIdx.x].over = true, progress++;
  _longjmp(scheduler, 1);
}

// Program `program`; 0, or -1 where threads wait for each other forever.
extern "C" int run(const Arguments* a, int program, u64 seed) {
  arguments = a, coin = seed, blockIdx.x = program;
  memset(memory, 0xFF, sizeof(memory));
  for (Meeting& m : meetings) m = {};
  for (Meeting& m : named) m = {};
  arrivals.clear();
  for (Thread& t : threads) t.begun = t.over = false, t.stack.resize(128 << 10);
  static int left, turn;  // setjmp spoils what lies in registers
  static u64 before;
  do {
    before = progress, left = 0;
    for (turn = 0; turn < THREADS; turn++) {
      Thread& t = threads[threadIdx.x = seed % 2 ? THREADS - 1 - turn : turn];  // no order of threads may matter
      if (t.over) continue;
      left++;
      if (_setjmp(scheduler)) continue;
      if (t.begun) _longjmp(t.at, 1);
      t.begun = true;
      getcontext(&t.start);
      t.start.uc_stack.ss_sp = t.stack.data();
      t.start.uc_stack.ss_size = t.stack.size();
      makecontext(&t.start, body, 0);
      setcontext(&t.start);
    }
  } while (left && progress != before);
  return left ? -1 : 0;
}
