// Reads what packing.py wrote: base64, deflated, a header and columns in planes of bytes.

/** The columns and facts of a <script type="application/octet-stream"> of the page. */
async function decode(id) {
  const text = $(id).textContent.trim();
  const raw = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  const all = new Uint8Array(await new Response(stream).arrayBuffer());
  const length = new DataView(all.buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(all.subarray(4, 4 + length)));
  const columns = {};
  let offset = 4 + length;
  for (const [name, count, width, rising] of header.columns) {
    columns[name] = readColumn(all.subarray(offset, offset + count * width), count, width, rising === 1);
    offset += count * width;
  }
  return { columns, facts: header.facts };
}

function readColumn(planes, count, width, rising) {
  // Sums of small differences may be large, so only columns of few bytes that do not rise are 32 bits wide.
  const values = !rising && width <= 3 ? new Int32Array(count) : new Float64Array(count);
  for (let plane = width - 1; plane >= 0; plane--) {
    const start = plane * count;
    for (let i = 0; i < count; i++) values[i] = values[i] * 256 + planes[start + i];
  }
  if (rising) {
    let sum = 0;
    for (let i = 0; i < count; i++) values[i] = sum += values[i];
  }
  return values;
}
