// Every kernel of the CPU, compiled as one: those of the names and arguments that Triton's have.
#include "adam.cpp"
#include "apex_lamb.cpp"
#include "copies.cpp"
#include "lamb.cpp"
#include "reduce.cpp"
#include "rules.cpp"
#include "sgd.cpp"
// Needs the rules and the kinds of norms:
#include "finalise.cpp"
#include "rows.cpp"
