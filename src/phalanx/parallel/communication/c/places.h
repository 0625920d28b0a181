// What is known of a rank while it notes, and where in the code a collective was called from.
#pragma once
#include <Python.h>

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>
#include <unistd.h>

#define LARGEST UINT32_MAX

typedef struct {
  int64_t launched, arrived, waiting, left;
  uint32_t sequence, step;
  uint16_t group, site, user, nothing;
  uint8_t kind, dtype, phase, flags;
  uint32_t shape[4], padding;
  int64_t number;
} Record;

_Static_assert(sizeof(Record) == RECORD_SIZE, "a record is packed");
_Static_assert(offsetof(Record, flags) == FLAGS_AT, "a record is packed");

// From code, and a place in it, to a number; 0: not known. Code itself, at no place, to whose it is. Code is known by
// where it lies in memory, and `Places` keeps it there.
typedef struct {
  uintptr_t code;
  int at, value;
} Entry;

typedef struct {
  PyObject_HEAD
  Py_buffer memory, spent, waited, along, beside;
  PyObject *places, *sums, *clock, *groups;
  int64_t step, summed, since, count, had, queued, compiled;
  int64_t along_before[GROUPS], *sums_of_step;
  int phase, has_summed, processor;
  unsigned long main;
  Entry *entries;
  size_t room, used;
  int64_t covered[GROUPS];
  int further[SITES], in_vain[SITES];
} Notes;

typedef struct {
  PyObject_HEAD
  Notes *notes;
  Py_buffer signs;
  PyObject *launching, *waited, *sent, *calls, *watchers, *wait_watchers;
  unsigned long main;
  char in_graph;
} Launches;

typedef struct {
  PyObject_HEAD
  Launches *launches;
  PyObject *axis, *kind, *since, *waits, *watched;
  int64_t record;
  int cuda, main;
} Launched;

static PyTypeObject NotesType, LaunchesType, LaunchedType;
static PyObject *kinds, *dtypes, *phases, *phase_names, *instant, *exit_stack, *getframe, *main_thread_of, *compiled_frames,
    *compile_seconds;
static int64_t item_sizes[256];
static PyObject *word_shape, *word_dtype, *word_is_cuda, *word_nbytes, *word_owner, *word_new_site,
    *word_new_group, *word_enter_context, *word_exit, *word_receive, *one, *no_instant;

// Places in the code.

static size_t place_of(Notes *self, uintptr_t code, int at) {
  uint64_t mixed = ((uint64_t)(code >> 4) + (uint64_t)(unsigned)(at + 1) * 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
  size_t place = (size_t)(mixed >> 32) & (self->room - 1);
  while (self->entries[place].code && (self->entries[place].code != code || self->entries[place].at != at))
    place = (place + 1) & (self->room - 1);
  return place;
}

static int known(Notes *self, uintptr_t code, int at) { return self->entries[place_of(self, code, at)].value; }

static int keep(Notes *self, uintptr_t code, int at, int value) {
  if (2 * (self->used + 1) > self->room) {
    Entry *before = self->entries;
    size_t room = self->room;
    Entry *after = PyMem_Calloc(2 * room, sizeof(Entry));
    if (!after) return PyErr_NoMemory(), -1;
    self->entries = after;
    self->room = 2 * room;
    for (size_t i = 0; i < room; ++i)
      if (before[i].code) after[place_of(self, before[i].code, before[i].at)] = before[i];
    PyMem_Free(before);
  }
  self->entries[place_of(self, code, at)] = (Entry){code, at, value};
  self->used++;
  return 0;
}

static int to_int(PyObject *found) {
  if (!found) return -1;
  long value = PyLong_AsLong(found);
  Py_DECREF(found);
  return (int)value;
}

static uintptr_t code_of(PyFrameObject *frame) {
  PyCodeObject *code = PyFrame_GetCode(frame);  // the frame keeps it
  Py_DECREF(code);
  return (uintptr_t)code;
}

static int owner_of(Notes *self, PyFrameObject *frame) {
  uintptr_t code = code_of(frame);
  int found = known(self, code, -1);
  if (found) return found;
  found = to_int(PyObject_CallMethodObjArgs(self->places, word_owner, (PyObject *)code, NULL));
  if (found < 0 || keep(self, code, -1, found) < 0) return -1;
  return found;
}

static int known_site(Notes *self, PyFrameObject *frame) { return known(self, code_of(frame), PyFrame_GetLasti(frame)); }

static int site_of(Notes *self, PyFrameObject *frame) {
  int found = known_site(self, frame);
  if (found) return found;
  found = to_int(PyObject_CallMethodObjArgs(self->places, word_new_site, (PyObject *)frame, NULL));
  if (found > 0 && keep(self, code_of(frame), PyFrame_GetLasti(frame), found) < 0) return -1;
  return found;
}

static PyFrameObject *above(PyFrameObject *frame) {
  PyFrameObject *back = PyFrame_GetBack(frame);
  Py_DECREF(frame);
  return back;
}

// Frame by frame; takes over the reference to the frame.
static int search(Notes *self, PyFrameObject *frame, int *site, int *user) {
  int here = 0, depth = 0, begun = 0;
  for (int i = 0; i < DEEPEST && frame; ++i, ++depth) {
    int owner = owner_of(self, frame);
    if (owner < 0) goto failed;
    if (owner == USERS) {
      int found = site_of(self, frame);
      if (found < 0) goto failed;
      self->further[here] = here ? depth - begun : 0;
      *site = here ? here : found;
      *user = found;
      Py_DECREF(frame);
      return 0;
    }
    if (owner == ROOT) break;
    if (!here && owner == OTHERS) {
      here = site_of(self, frame);
      begun = depth;
      if (here < 0) goto failed;
    }
    frame = above(frame);
  }
  Py_XDECREF(frame);
  self->in_vain[here]++;
  *site = here;
  *user = 0;
  return 0;
failed:
  Py_DECREF(frame);
  return -1;
}

// Where the communicator was called, and the user's line that led there.
static int called(Notes *self, int *site, int *user) {
  PyFrameObject *frame = PyEval_GetFrame();
  int depth = 0;
  *site = *user = 0;
  Py_XINCREF(frame);
  for (; frame; frame = above(frame), ++depth) {
    int owner = owner_of(self, frame);
    if (owner < 0) {
      Py_DECREF(frame);
      return -1;
    }
    if (owner != OURS) break;
  }
  if (!frame) return 0;
  int here = known_site(self, frame), further = self->further[here];
  if (here && further) {
    PyObject *deep = PyLong_FromLong(depth + further);
    PyObject *found = deep ? PyObject_CallOneArg(getframe, deep) : NULL;
    Py_XDECREF(deep);
    if (found) {
      int there = known_site(self, (PyFrameObject *)found);
      int theirs = there && known(self, code_of((PyFrameObject *)found), -1) == USERS;
      Py_DECREF(found);
      if (theirs) {
        *site = here;
        *user = there;
        Py_DECREF(frame);
        return 0;
      }
    } else if (PyErr_ExceptionMatches(PyExc_ValueError)) {
      PyErr_Clear();  // the stack is not so deep
    } else {
      Py_DECREF(frame);
      return -1;
    }
  } else if (self->in_vain[here] >= TRIES) {
    *site = here;
    Py_DECREF(frame);
    return 0;
  }
  return search(self, frame, site, user);
}
