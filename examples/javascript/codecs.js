// Packed updates, with fewer bytes on the wire. The comments of codecs.proto say what every byte is.

'use strict';

const BLOCK = 256;
const SCALE_BYTES = 4;

/** Rounds to the nearest integer, and to the even one of two. */
function rounded(number) {
  const nearest = Math.round(number);
  return Math.abs(number % 1) === 0.5 && nearest % 2 !== 0 ? nearest - 1 : nearest;
}

/** Packs a tensor in a byte for each element, and a scale for each block of 256. Arithmetic is in float32. */
function packInt8({ elements }) {
  const numBlocks = Math.ceil(elements.length / BLOCK);
  const packed = new Uint8Array(numBlocks * SCALE_BYTES + elements.length);
  const view = new DataView(packed.buffer);
  for (let block = 0; block < numBlocks; block += 1) {
    const values = Float32Array.from(elements.subarray(block * BLOCK, (block + 1) * BLOCK));
    const scale = values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
    if (!Number.isFinite(scale)) {
      throw new Error('expected finite values, which int8 can represent');
    }
    const start = block * (SCALE_BYTES + BLOCK);
    view.setFloat32(start, scale, true);
    values.forEach((value, index) => {
      const number = scale ? rounded(Math.fround(Math.fround(value / scale) * 127)) : 0;
      view.setInt8(start + SCALE_BYTES + index, number);
    });
  }
  return { shape: [packed.length], elements: packed };
}

/** What packs tensors, and how messages call it, by name. */
const CODECS = { int8: { codec: 'CODEC_INT8', pack: packInt8 } };

module.exports = { CODECS, packInt8 };
